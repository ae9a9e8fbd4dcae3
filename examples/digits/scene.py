"""Scenes: one to twelve digits on a photograph, each legible, none on another, with the box of its ink."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from digits.ink import NAMES, Coverage, Ink, Name, make_ink
from digits.photographs import Pixels, background

Box = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom are the first ones outside

MOST_DIGITS = 12
SHAPES = ((1.0, 1.0), (1.0, 0.75), (0.75, 1.0))  # width and height of an image, as shares of its longer side
MOST_SHARED = 0.1
"""Largest share of the smaller of two boxes that lies in the other. Ink never lies on ink: strokes may touch."""
LEAST_DIFFERENCE = 0.3
"""Smallest difference in brightness between ink and nine tenths of the pixels of its box, where 1 is black to white."""
_CLEAR = 0.9
_TRIES = 400
_BRIGHTNESS = np.array([0.299, 0.587, 0.114])
_INKS = (
    (20, 20, 24), (16, 30, 96), (110, 12, 30), (10, 70, 40), (70, 24, 92), (96, 52, 8),
    (250, 250, 244), (255, 226, 70), (150, 240, 255), (255, 170, 150), (170, 255, 150), (240, 190, 255),
)  # fmt: skip


@dataclass(frozen=True)
class Hand:
    """How digits are written. kinds: zero and those that follow. smallest, largest: heights, as shares of an image's
    shorter side.
    """

    kinds: int = len(NAMES)
    smallest: float = 0.14
    largest: float = 0.5


ANY_HAND = Hand()


@dataclass(frozen=True)
class Placed:
    """A digit in a scene. area: pixels that are ink by half or more."""

    digit: int
    scan: int
    box: Box
    area: int


@dataclass(frozen=True)
class Scene:
    """An image (height, width, 3), its digits in the order in which they were written, and which pixels are ink."""

    pixels: Pixels
    digits: tuple[Placed, ...]
    inked: NDArray[np.bool_]


def make_scene(
    seed: int, part: Name, index: int, *, side: int, most: int = MOST_DIGITS, hand: Hand = ANY_HAND
) -> Scene:
    """Return scene number `index` of a part, the same for the same arguments; `side` is the longer one in pixels."""
    rng = random.Random(f"{seed}/{part}/{index}")
    wide, high = rng.choice(SHAPES)
    paper = background(rng, part, index, (round(side * wide), round(side * high))).astype(np.float64)
    return _Writing(rng, part, paper, hand).scene(rng.randint(1, most))


class _Writing:
    """A photograph that is being written on."""

    def __init__(self, rng: random.Random, part: Name, paper: NDArray[np.float64], hand: Hand) -> None:
        self._rng, self._part, self._hand = rng, part, hand
        self._paper = paper
        self._brightness = paper @ _BRIGHTNESS / 255
        self._size = paper.shape[0], paper.shape[1]
        self._inked = np.zeros(self._size, dtype=np.bool_)
        self._placed: list[Placed] = []

    def scene(self, wanted: int) -> Scene:
        """Write digits until there are as many as are wanted, or no more find a place."""
        largest = min(self._hand.largest, 1.1 / wanted**0.5)
        for _ in range(_TRIES):
            if len(self._placed) == wanted:
                break
            height = self._rng.uniform(self._hand.smallest, largest) * min(self._size)
            self._write(make_ink(self._rng, self._part, height, self._hand.kinds))
        return Scene(np.rint(self._paper).astype(np.uint8), tuple(self._placed), self._inked)

    def _write(self, ink: Ink) -> None:
        """Write a digit at a random place with a random ink, unless it would lie on another or be hard to read."""
        high, wide = ink.coverage.shape
        room_high, room_wide = self._size[0] - high, self._size[1] - wide
        if min(room_high, room_wide) < 0:
            return
        left, top = self._rng.randint(0, room_wide), self._rng.randint(0, room_high)
        box = left, top, left + wide, top + high
        place = slice(top, top + high), slice(left, left + wide)
        seen = ink.coverage >= 0.5
        colours = legible(self._brightness[place])
        if not colours or (self._inked[place] & seen).any() or _overlaps(box, self._placed):
            return
        self._inked[place] |= seen
        self._paper[place] = _blend(self._paper[place], ink.coverage, self._rng.choice(colours))
        self._placed.append(Placed(ink.digit, ink.scan, box, int(seen.sum())))


def legible(brightness: NDArray[np.float64]) -> list[tuple[int, int, int]]:
    """Return the inks that can be read on a place of this brightness."""
    return [
        colour
        for colour in _INKS
        if (np.abs(brightness - np.dot(colour, _BRIGHTNESS) / 255) >= LEAST_DIFFERENCE).mean() >= _CLEAR
    ]


def shared(a: Box, b: Box) -> float:
    """Return the share of the smaller of two boxes that lies in the other."""
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return max(wide, 0) * max(high, 0) / smaller


def _overlaps(box: Box, placed: Sequence[Placed]) -> bool:
    return any(shared(box, other.box) > MOST_SHARED for other in placed)


def _blend(paper: NDArray[np.float64], coverage: Coverage, colour: tuple[int, int, int]) -> NDArray[np.float64]:
    share = coverage[..., None].astype(np.float64)
    blended: NDArray[np.float64] = paper * (1 - share) + np.array(colour) * share
    return blended
