"""The data set on disk: JPEG images and COCO's annotation file. Format: https://cocodataset.org/#format-data"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from digits.ink import NAMES, Name
from digits.scene import ANY_HAND, MOST_DIGITS, Hand, Placed, Scene, make_scene

_QUALITY = 92


@dataclass(frozen=True)
class Part:
    """One part of the data set. side: of an image, the longer one in pixels. most: digits in an image."""

    name: Name
    count: int
    seed: int
    side: int
    most: int = MOST_DIGITS
    hand: Hand = ANY_HAND

    def scene(self, index: int) -> Scene:
        """Return the part's scene number `index`."""
        return make_scene(self.seed, self.name, index, side=self.side, most=self.most, hand=self.hand)


def write_part(folder: Path, part: Part) -> Iterator[Scene]:
    """Write `<folder>/<part>/*.jpg` and then `<folder>/<part>.json`, and yield each scene once its image is written.

    The annotation file appears when all of its images are there.
    """
    (folder / part.name).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(part.count):
        scene, name = part.scene(index), f"{index:06d}.jpg"
        # Full resolution of colours: at half of it thin strokes lose theirs.
        Image.fromarray(scene.pixels).save(folder / part.name / name, quality=_QUALITY, subsampling=0)
        height, width, _ = scene.pixels.shape
        images.append({"id": index + 1, "file_name": name, "width": width, "height": height})
        for placed in scene.digits:
            annotations.append(_annotation(placed, len(annotations) + 1, index + 1))
        yield scene
    document = {
        "info": {"description": f"Handwritten digits on photographs: {part.name}, seed {part.seed}"},
        "images": images,
        "annotations": annotations,
        "categories": [{"id": digit + 1, "name": name} for digit, name in enumerate(NAMES[: part.hand.kinds])],
    }
    unfinished = folder / f".{part.name}.json.unfinished"
    unfinished.write_text(json.dumps(document) + "\n", encoding="utf-8")
    unfinished.replace(folder / f"{part.name}.json")


def _annotation(placed: Placed, number: int, image: int) -> dict[str, Any]:
    left, top, right, bottom = placed.box
    return {
        "id": number,
        "image_id": image,
        "category_id": placed.digit + 1,
        "bbox": [left, top, right - left, bottom - top],
        "area": placed.area,
        "iscrowd": 0,
    }
