"""Make the summary data set: small images of coloured shapes, and how many there are of each colour and kind.

    python examples/make_summaries.py out/summaries --train 64 --held-out 16

writes out/summaries/train.jsonl, out/summaries/held-out.jsonl and out/summaries/images/*.png. The same arguments give
the same data set on every machine. A record's `summary_ref` is its right answer, as
examples/job-grpo-6v2-tiny.yaml describes it: `{"items": [{"desc": "red", "kind": {"box": 1}}]}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from rich.progress import track

from tiny_model.scenes import Scene, draw, make_scene
from tiny_model.summaries import MAX_SHAPES, TEMPLATE, summary


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    train: Annotated[int, typer.Option(min=0, help="Images in train.jsonl.")] = 256,
    held_out: Annotated[int, typer.Option(min=0, help="Images in held-out.jsonl.")] = 32,
    seed: Annotated[int, typer.Option(help="Another seed gives other images.")] = 7,
    max_shapes: Annotated[int, typer.Option(min=1, help="Most shapes in an image; the fewest is 1.")] = MAX_SHAPES,
) -> None:
    """Make the summary data set."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("held-out", held_out)):
        scenes = (make_scene(seed, name, index, max_shapes=max_shapes) for index in range(count))
        lines = [json.dumps(record) for record in track(_written(folder, name, scenes), f"{name:8}", total=count)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{folder / name}.jsonl: {count} images")


def _written(folder: Path, name: str, scenes: Iterator[Scene]) -> Iterator[dict[str, object]]:
    for index, scene in enumerate(scenes):
        image = f"images/{name}-{index:05d}.png"
        Image.fromarray(draw(scene)).save(folder / image, optimize=False)
        metadata = {
            "_fusion_source": "shapes",
            "_fusion_template": TEMPLATE,
            "_fusion_mode": "summary",
            "summary_ref": json.dumps(summary(scene)),
        }
        yield {"images": [image], "metadata": metadata}


if __name__ == "__main__":
    typer.run(main)
