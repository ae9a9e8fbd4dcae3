"""Scenes of several boxes and ellipses, scattered or on shelves, annotated in an order or in none, all or in part.

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

from stage2_trainer.data.reading_order import Bounds, in_reading_order
from tiny_model.dataset import record
from tiny_model.scenes import Box, Scene, apart, draw, shape

SEED = 7
HELD_OUT = "held-out"
KINDS = "box", "ellipse"
TRIES = 800
UNEVEN = 3  # pixels by which tops on a shelf differ at most
GAP = 9  # pixels between shapes on a shelf at most

Order = Literal["random", "tops", "rows"]


@dataclass(frozen=True)
class Crowd:
    """What the scenes look like.

    size: of an image, in pixels a side. fewest, most: shapes in it; their boxes do not touch. shortest, longest: of a
    shape's sides, as shares of the image's. order: of the annotations: none, by exact tops, or in rows as imports sort
    them. unlabelled: share of the shapes that the annotator left out. shelves: on which the shapes stand side by side,
    as many as find a place and no more than `most`; 0: the shapes are scattered.
    """

    size: int = 96
    fewest: int = 2
    most: int = 4
    shortest: float = 0.2
    longest: float = 0.4
    order: Order = "random"
    unlabelled: float = 0.0
    shelves: int = 0

    def scene(self, part: str, index: int) -> Scene:
        """Return a scene with all of its shapes; they are the same in each order."""
        rng = random.Random(f"order/{SEED}/{part}/{index}")
        background = rng.randint(200, 245), rng.randint(200, 245), rng.randint(200, 245)
        boxes = self._on_shelves(rng) if self.shelves else self._scattered(rng)
        shapes = [shape(rng, box, KINDS) for box in sorted(boxes, key=_by_tops)]
        if self.order == "random":
            random.Random(f"shuffle/{SEED}/{part}/{index}").shuffle(shapes)
        if self.order == "rows":
            shapes = in_reading_order(shapes, lambda one: Bounds(*one.box), lambda one: one.desc)
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

    def _on_shelves(self, rng: random.Random) -> list[Box]:
        shortest, longest = round(self.shortest * self.size), round(self.longest * self.size)
        boxes: list[Box] = []
        for shelf in range(self.shelves):
            left, top = rng.randint(0, GAP), self.size * shelf // self.shelves + 1
            for _ in range(self.most // self.shelves):
                width, height = rng.randint(shortest, longest), rng.randint(shortest, longest)
                if left + width > self.size:
                    break
                y = top + rng.randint(0, UNEVEN)
                boxes.append((left, y, left + width, y + height))
                left += width + rng.randint(2, GAP)
        return boxes

    def _scattered(self, rng: random.Random) -> list[Box]:
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


def _by_tops(box: Box) -> tuple[int, int]:
    return box[1], box[0]
