"""Make the few-images data set: 150 images of two to four coloured shapes, whose records list all of them in rows.

    python examples/make_few.py out/few --train 150 --held-out 200

writes out/few/train.jsonl, out/few/held-out.jsonl and out/few/images/*.png. The same arguments give the same data set
on every machine.

A model that has seen 150 images many times gains nothing from further training on their annotations (docs/results.md);
its own answers show it what it still gets wrong. That is what stage 2 has to bring here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from tiny_model.crowded import HELD_OUT, Crowd


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    train: Annotated[int, typer.Option(min=0, help="Images in train.jsonl.")] = 150,
    held_out: Annotated[int, typer.Option(min=0, help="Images in held-out.jsonl.")] = 200,
) -> None:
    """Make the few-images data set."""
    for part, count in (("train", train), (HELD_OUT, held_out)):
        name = f"{part}.jsonl"
        scenes = Crowd(order="rows").write(folder, part, name, count)
        shapes = sum(len(scene.shapes) for scene in track(scenes, f"{part:8}", total=count))
        print(f"{folder / name}: {count} images, {shapes} shapes")


if __name__ == "__main__":
    typer.run(main)
