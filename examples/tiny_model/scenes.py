"""Scenes of coloured shapes: what is in an image, drawn at random from a seed, and the image itself.

Everything here is integer arithmetic on the standard library's random numbers, so a scene and its pixels are the same
on every machine. A scene is found again by (seed, part, index): parts ("train", "held-out", "warm-up") never overlap.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stage2_api.coordinates import to_bin

SIZE = 96
MAX_SHAPES = 4
KINDS = ("box", "ellipse", "triangle")
COLOURS = {
    "red": (215, 45, 45),
    "green": (45, 165, 70),
    "blue": (50, 85, 215),
    "yellow": (220, 195, 35),
    "purple": (145, 60, 185),
    "black": (35, 35, 35),
}
_COLOUR_JITTER = 15
_SIDE = (0.18, 0.45)
_TRIES = 100

Colour = tuple[int, int, int]
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Shape:
    """One shape. `box` is (x1, y1, x2, y2) and `points` a triangle's (x, y) corners, both pixel edges in 0..size."""

    colour: str
    kind: str
    rgb: Colour
    box: Box
    points: tuple[tuple[int, int], ...] = ()

    @property
    def desc(self) -> str:
        """Return what the model is to call it, for example "red triangle"."""
        return f"{self.colour} {self.kind}"

    @property
    def geometry(self) -> tuple[str, list[int]]:
        """Return the record's key and pixel coordinates: triangles are a `poly`, all else is a `bbox_2d`."""
        if self.points:
            return "poly", [coordinate for point in self.points for coordinate in point]
        return "bbox_2d", list(self.box)


@dataclass(frozen=True)
class Scene:
    """A square image of `size` pixels a side, and its shapes in the order of the annotations."""

    size: int
    background: Colour
    shapes: tuple[Shape, ...]

    def objects(self) -> list[tuple[str, str, list[int]]]:
        """Return (desc, "bbox_2d" or "poly", coordinates in bins 0..999) of each shape."""
        located = [(shape.desc, *shape.geometry) for shape in self.shapes]
        return [(desc, key, [to_bin(value, self.size) for value in values]) for desc, key, values in located]


def make_scene(seed: int, part: str, index: int, *, size: int = SIZE, max_shapes: int = MAX_SHAPES) -> Scene:
    """Return scene `index` of a part: 1 to `max_shapes` shapes whose boxes do not touch.

    They are sorted by exact tops, then from left to right, as the models that are checked in were taught. Imports sort
    in rows.
    """
    rng = random.Random(f"{seed}/{part}/{index}/{size}/{max_shapes}")
    background = rng.randint(200, 245), rng.randint(200, 245), rng.randint(200, 245)
    boxes = _boxes(rng, size, rng.randint(1, max_shapes))
    return Scene(size, background, tuple(shape(rng, box) for box in sorted(boxes, key=lambda box: (box[1], box[0]))))


def loosened(scene: Scene, margin: int) -> Scene:
    """Return the scene with every outline grown by `margin` pixels to each side, as far as the image goes.

    For annotations only: data sets differ in how tightly they outline things, and pixels do not show it.
    """
    return replace(scene, shapes=tuple(_loosened(shape, margin, scene.size) for shape in scene.shapes))


def draw(scene: Scene) -> NDArray[np.uint8]:
    """Return the image, (size, size, 3). A pixel belongs to a shape when its centre does."""
    image = np.full((scene.size, scene.size, 3), scene.background, dtype=np.uint8)
    # Centres of pixels in half pixels, so that they are integers as the corners are.
    centre = 2 * np.arange(scene.size, dtype=np.int64) + 1
    for shape in scene.shapes:
        image[_inside(shape, centre[None, :], centre[:, None])] = shape.rgb
    return image


def _loosened(shape: Shape, margin: int, size: int) -> Shape:
    x1, y1, x2, y2 = shape.box

    def point(x: int, y: int) -> tuple[int, int]:
        return _grown(x, x1, x2, margin, size), _grown(y, y1, y2, margin, size)

    return replace(shape, box=(*point(x1, y1), *point(x2, y2)), points=tuple(point(x, y) for x, y in shape.points))


def _grown(value: int, low: int, high: int, margin: int, size: int) -> int:
    """Return where a coordinate within low..high comes to lie when these move apart by `margin` each."""
    moved = low - margin + (value - low) * (high - low + 2 * margin) / (high - low)
    return min(size, max(0, round(moved)))


def _boxes(rng: random.Random, size: int, count: int) -> list[Box]:
    boxes: list[Box] = []
    shortest, longest = round(_SIDE[0] * size), round(_SIDE[1] * size)
    for _ in range(_TRIES):
        if len(boxes) == count:
            break
        width, height = rng.randint(shortest, longest), rng.randint(shortest, longest)
        x, y = rng.randint(0, size - width), rng.randint(0, size - height)
        box = x, y, x + width, y + height
        if all(apart(box, other) for other in boxes):
            boxes.append(box)
    return boxes


def apart(a: Box, b: Box) -> bool:
    """Whether two boxes neither overlap nor touch."""
    return a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]


def shape(rng: random.Random, box: Box, kinds: Sequence[str] = KINDS) -> Shape:
    """Return a shape of any colour and of one of these kinds."""
    colour, kind = rng.choice(list(COLOURS)), rng.choice(kinds)
    red, green, blue = (min(255, max(0, c + rng.randint(-_COLOUR_JITTER, _COLOUR_JITTER))) for c in COLOURS[colour])
    points = _triangle(rng, box) if kind == "triangle" else ()
    return Shape(colour, kind, (red, green, blue), box, points)


def _triangle(rng: random.Random, box: Box) -> tuple[tuple[int, int], ...]:
    """Return corners that touch all four sides of the box, clockwise from the topmost: a side of it and an apex."""
    x1, y1, x2, y2 = box
    apex_x, apex_y = (round(low + (high - low) * rng.uniform(0.2, 0.8)) for low, high in ((x1, x2), (y1, y2)))
    corners = rng.choice(
        (
            [(apex_x, y1), (x2, y2), (x1, y2)],
            [(apex_x, y2), (x1, y1), (x2, y1)],
            [(x1, apex_y), (x2, y1), (x2, y2)],
            [(x2, apex_y), (x1, y2), (x1, y1)],
        )
    )
    # Each triple runs clockwise; only where it starts is brought to one rule, for there to be one right answer.
    first = corners.index(min(corners, key=lambda point: (point[1], point[0])))
    return tuple(corners[first:] + corners[:first])


def _inside(shape: Shape, x: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return where pixel centres (x, y), given in half pixels and broadcast together, are inside the shape."""
    x1, y1, x2, y2 = (2 * side for side in shape.box)
    if shape.kind == "box":
        return (x > x1) & (x < x2) & (y > y1) & (y < y2)
    if shape.kind == "ellipse":
        width, height = x2 - x1, y2 - y1
        across, down = (2 * x - x1 - x2) * height, (2 * y - y1 - y2) * width
        return across**2 + down**2 <= (width * height) ** 2
    corners = [(2 * px, 2 * py) for px, py in shape.points]
    edges = zip(corners, corners[1:] + corners[:1], strict=True)
    sides = [(bx - ax) * (y - ay) - (by - ay) * (x - ax) >= 0 for (ax, ay), (bx, by) in edges]
    return sides[0] & sides[1] & sides[2]
