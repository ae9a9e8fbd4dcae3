"""Scenes of several boxes and ellipses, annotated from top to bottom or in no order, all or in part.

The same scenes in two orders tell behaviour from perception: what a model loses without an order, it does not lose to
its eyes. A scene is found again by (part, index), as those of `scenes`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from PIL import Image

from tiny_model.dataset import record
from tiny_model.scenes import Box, Scene, apart, draw, shape

SEED = 7
HELD_OUT = "held-out"
KINDS = "box", "ellipse"
TRIES = 800


@dataclass(frozen=True)
class Crowd:
    """What the scenes look like.

    size: of an image, in pixels a side. fewest, most: shapes in it; their boxes do not touch. shortest, longest: of a
    shape's sides, as shares of the image's. unlabelled: share of the shapes that the annotator left out.
    """

    size: int = 96
    fewest: int = 2
    most: int = 4
    shortest: float = 0.2
    longest: float = 0.4
    order: Literal["random", "sorted"] = "random"
    unlabelled: float = 0.0

    def scene(self, part: str, index: int) -> Scene:
        """Return a scene with all of its shapes; they are the same in each order."""
        rng = random.Random(f"order/{SEED}/{part}/{index}")
        background = rng.randint(200, 245), rng.randint(200, 245), rng.randint(200, 245)
        boxes = self._boxes(rng)
        shapes = [shape(rng, box, KINDS) for box in sorted(boxes, key=lambda box: (box[1], box[0]))]
        if self.order == "random":
            random.Random(f"shuffle/{SEED}/{part}/{index}").shuffle(shapes)
        return Scene(self.size, background, tuple(shapes))

    def labelled(self, scene: Scene) -> Scene:
        """Return a scene with the shapes that its annotator has listed, at least one."""
        rng = random.Random(f"unlabelled/{SEED}/{scene.shapes}")
        kept = tuple(one for one in scene.shapes if rng.random() >= self.unlabelled)
        return replace(scene, shapes=kept or scene.shapes[:1])

    def write(self, folder: Path, part: str, name: str, count: int) -> Iterator[Scene]:
        """Write `count` images of a part and the JSONL file `name` that lists them; yield each scene.

        Held-out scenes are annotated completely.
        """
        (folder / "images").mkdir(parents=True, exist_ok=True)
        lines = []
        for index in range(count):
            scene, image = self.scene(part, index), f"images/{part}-{index:05d}.png"
            Image.fromarray(draw(scene)).save(folder / image, optimize=False)
            lines.append(json.dumps(record(scene if part == HELD_OUT else self.labelled(scene), image)) + "\n")
            yield scene
        (folder / name).write_text("".join(lines), encoding="utf-8")

    def _boxes(self, rng: random.Random) -> list[Box]:
        wanted = rng.randint(self.fewest, self.most)
        shortest, longest = round(self.shortest * self.size), round(self.longest * self.size)
        boxes: list[Box] = []
        for _ in range(TRIES):
            if len(boxes) == wanted:
                break
            width, height = rng.randint(shortest, longest), rng.randint(shortest, longest)
            x, y = rng.randint(0, self.size - width), rng.randint(0, self.size - height)
            box = (x, y, x + width, y + height)
            if all(apart(box, other) for other in boxes):
                boxes.append(box)
        return boxes
