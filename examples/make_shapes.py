"""Make the shapes data set: small images of coloured shapes, and JSONL records of what is in them.

    python examples/make_shapes.py out/shapes --train 512 --held-out 64

writes out/shapes/train.jsonl, out/shapes/held-out.jsonl and out/shapes/images/*.png. The same arguments give the same
data set on every machine.

The outlines are looser than those that the tiny model was warmed up on: that is what stage 2 has to learn here.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from stage2_api.coordinates import MAX_BIN, coord_token
from tiny_model.dataset import Part, write_part


class Coordinates(StrEnum):
    """How the records write a coordinate."""

    tokens = "tokens"
    pixels = "pixels"


def main(
    folder: Annotated[Path, typer.Argument(help="Where to write; made if missing.")],
    train: Annotated[int, typer.Option(min=0, help="Images in train.jsonl.")] = 512,
    held_out: Annotated[int, typer.Option(min=0, help="Images in held-out.jsonl.")] = 64,
    seed: Annotated[int, typer.Option(help="Another seed gives other images.")] = 7,
    max_shapes: Annotated[int, typer.Option(min=1, help="Most shapes in an image; the fewest is 1.")] = 2,
    margin: Annotated[int, typer.Option(min=0, help="Pixels between a shape and its annotated outline.")] = 6,
    coordinates: Annotated[
        Coordinates, typer.Option(help=f"Coord tokens {coord_token(0)}..{coord_token(MAX_BIN)}, or pixel numbers.")
    ] = Coordinates.tokens,
) -> None:
    """Make the shapes data set."""
    for name, count in (("train", train), ("held-out", held_out)):
        part = Part(name, count, seed, max_shapes=max_shapes, margin=margin, coordinates=coordinates.value)
        shapes = sum(len(scene.shapes) for scene in track(write_part(folder, part), f"{name:8}", total=count))
        print(f"{folder / name}.jsonl: {count} images, {shapes} shapes")


if __name__ == "__main__":
    typer.run(main)
