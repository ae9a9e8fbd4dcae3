"""The objects of an image as a model listed them, in pixels; and a picture of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from PIL import Image

from stage2_api.coordinates import BINS
from stage2_trainer.data.drawing import Outline, draw_outlines
from stage2_trainer.data.images import load_image
from stage2_trainer.matching.parse import Kind
from stage2_trainer.scores.plain_answers import read_plain_answer
from stage2_trainer.scores.scored_image import count_coordinates, read_answer

COLORS = ("#cf222e", "#0969da", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#1b7c83", "#57606a")
"""One for each name, in the order of their first objects."""


@dataclass(frozen=True)
class Box:
    """One object. box: left, top, right and bottom. outline: x and y in turn; none where the model gave a box.

    All numbers are pixels of the image as it is displayed, from its upper left corner.
    """

    desc: str
    box: tuple[float, float, float, float]
    outline: tuple[float, ...] = ()


@dataclass(frozen=True)
class AnsweredImage:
    """An image, `width` by `height` pixels as it is displayed, and what a model answered.

    whole: the answer is complete, and each of its entries is an object. text: the answer as it is.
    """

    image: str
    width: int
    height: int
    boxes: tuple[Box, ...]
    whole: bool
    text: str

    @classmethod
    def from_text(cls, image: str, size: tuple[int, int], text: str, finish_reason: str | None) -> AnsweredImage:
        """Read an answer: with coordinate tokens as training reads it, any other as JSON with numbers to 1,000."""
        objects, whole = _objects(text, finish_reason)
        return cls(image, *size, tuple(_in_pixels(*one, size) for one in objects), whole, text)

    def picture(self, *, width: int = 1024) -> Image.Image:
        """Return the image, `width` pixels wide, with its objects."""
        names = list(dict.fromkeys(one.desc for one in self.boxes))
        outlines = [
            Outline(
                "poly" if one.outline else "bbox",
                self._bins(one),
                one.desc,
                COLORS[names.index(one.desc) % len(COLORS)],
            )
            for one in self.boxes
        ]
        return draw_outlines(load_image(self.image), outlines, width=width)

    def _bins(self, one: Box) -> list[int]:
        numbers = _beside_sides(one.outline or one.box, (self.width, self.height))
        return [round(number / side * BINS) for number, side in numbers]


def _objects(text: str, finish_reason: str | None) -> tuple[list[tuple[str, Kind, Sequence[float]]], bool]:
    if count_coordinates(text):
        answer = read_answer(text, finish_reason=finish_reason)
        return [(one.desc, one.kind, one.bins) for one in answer.objects], answer.parsed
    plain = read_plain_answer(text)
    return [(one.desc, one.kind, one.numbers) for one in plain.objects], plain.is_whole and finish_reason == "stop"


def _in_pixels(desc: str, kind: Kind, bins: Sequence[float], size: tuple[int, int]) -> Box:
    points = tuple(round(number / BINS * side, 1) for number, side in _beside_sides(bins, size))
    xs, ys = points[::2], points[1::2]
    return Box(desc, (min(xs), min(ys), max(xs), max(ys)), points if kind == "poly" else ())


def _beside_sides(numbers: Sequence[float], size: tuple[int, int]) -> Iterator[tuple[float, int]]:
    return zip(numbers, cycle(size), strict=False)
