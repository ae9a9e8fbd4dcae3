"""Make the digits data set: real handwritten digits on crops of real photographs, as COCO annotations.

    python examples/make_digits.py out/digits --train 2000 --test 200 --size 320

writes out/digits/{train,test}/*.jpg and out/digits/{train,test}.json. The same arguments give the same scenes on every
machine. Nothing is downloaded: scikit-learn and scikit-image ship the pictures (`pip install 'stage2[examples]'`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from digits.coco import Part, write_part
from digits.ink import Name
from digits.page import page
from digits.scene import MOST_DIGITS


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    train: Annotated[int, typer.Option(min=0, help="Images in train.json.")] = 2000,
    test: Annotated[int, typer.Option(min=0, help="Images in test.json.")] = 200,
    size: Annotated[int, typer.Option(min=48, help="Longer side of an image in pixels.")] = 320,
    most: Annotated[int, typer.Option(min=1, max=MOST_DIGITS, help="Most digits in an image; the fewest is 1.")] = (
        MOST_DIGITS
    ),
    seed: Annotated[int, typer.Option(help="Another seed gives other images.")] = 7,
    picture: Annotated[Path | None, typer.Option(help="Draw the first images of test.json with their boxes here.")] = (
        None
    ),
) -> None:
    """Make the digits data set."""
    counts: tuple[tuple[Name, int], ...] = (("train", train), ("test", test))
    for name, count in counts:
        part = Part(name, count, seed, size, most)
        digits = sum(len(scene.digits) for scene in track(write_part(folder, part), f"{name:5}", total=count))
        print(f"{folder / name}.json: {count} images, {digits} digits")
    if picture is not None:
        page(Part("test", test, seed, size, most)).save(picture, optimize=True)
        print(f"{picture}: the first images of test.json")


if __name__ == "__main__":
    typer.run(main)
