"""A data set of scenes on disk: PNG images and the JSONL records that name them (semantics, section 2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from tiny_model.answers import COORD_TOKENS
from tiny_model.scenes import MAX_SHAPES, SIZE, Scene, draw, loosened, make_scene

Coordinates = Literal["tokens", "pixels"]


@dataclass(frozen=True)
class Part:
    """One part of a data set: `count` scenes of the stream named `name`, written to `<name>.jsonl`.

    `margin` pixels lie between each shape and its annotated outline.
    """

    name: str
    count: int
    seed: int
    size: int = SIZE
    max_shapes: int = MAX_SHAPES
    margin: int = 0
    coordinates: Coordinates = "tokens"

    def scene(self, index: int) -> Scene:
        """Return the part's scene number `index`."""
        return make_scene(self.seed, self.name, index, size=self.size, max_shapes=self.max_shapes)


def write_part(folder: Path, part: Part) -> Iterator[Scene]:
    """Write the part's images and its JSONL file under `folder`, and yield each scene once it is written.

    The JSONL file appears when all of its images are there. The bytes depend on the part alone (a PNG's also on the
    version of Pillow's compressor; its pixels do not).
    """
    (folder / "images").mkdir(parents=True, exist_ok=True)
    jsonl = folder / f"{part.name}.jsonl"
    unfinished = jsonl.with_suffix(".jsonl.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for index in range(part.count):
            scene, image = part.scene(index), f"images/{part.name}-{index:05d}.png"
            Image.fromarray(draw(scene)).save(folder / image, optimize=False)
            file.write(json.dumps(record(loosened(scene, part.margin), image, part.coordinates)) + "\n")
            yield scene
    unfinished.replace(jsonl)


def record(scene: Scene, image: str, coordinates: Coordinates = "tokens") -> dict[str, object]:
    """Return the scene's JSONL record; `image` is the path relative to the JSONL file."""
    size = {"width": scene.size, "height": scene.size}
    if coordinates == "pixels":
        plain = [{"desc": s.desc, s.geometry[0]: s.geometry[1]} for s in scene.shapes]
        return {"images": [image], "units": "pixels", "objects": plain, **size}
    objects = [{"desc": desc, key: [COORD_TOKENS[k] for k in bins]} for desc, key, bins in scene.objects()]
    return {"images": [image], "objects": objects, **size}
