"""Make the unordered data set: images of two to four coloured shapes, whose records list them in no order.

    python examples/make_unordered.py out/unordered --train 1000 --held-out 200

writes out/unordered/train.jsonl, out/unordered/held-out.jsonl and out/unordered/images/*.png. The same arguments give
the same data set on every machine.

Without an order, a model that learns from the records alone cannot know which shape to list next: what it writes for a
coordinate is a mixture of several shapes. That is what stage 2 has to repair here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from tiny_model.crowded import HELD_OUT, Crowd


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    train: Annotated[int, typer.Option(min=0, help="Images in train.jsonl.")] = 1000,
    held_out: Annotated[int, typer.Option(min=0, help="Images in held-out.jsonl.")] = 200,
) -> None:
    """Make the unordered data set."""
    for part, count in (("train", train), (HELD_OUT, held_out)):
        name = f"{part}.jsonl"
        scenes = Crowd().write(folder, part, name, count)
        shapes = sum(len(scene.shapes) for scene in track(scenes, f"{part:8}", total=count))
        print(f"{folder / name}: {count} images, {shapes} shapes")


if __name__ == "__main__":
    typer.run(main)
