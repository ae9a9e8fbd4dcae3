"""A page of the data set's first images, each with its boxes and names."""

from __future__ import annotations

from PIL import Image

from digits.coco import Part
from digits.ink import NAMES
from digits.scene import Scene
from stage2_api.coordinates import to_bin
from stage2_trainer.data.drawing import Outline, draw_outlines, grid

_COLUMNS, _ROWS = 4, 2
_CELL = 200
_COLOURS = 96  # few enough for a small PNG


def page(part: Part) -> Image.Image:
    """Return up to eight scenes of a part in rows of four."""
    shown = [_outlined(part.scene(index)) for index in range(min(part.count, _COLUMNS * _ROWS))]
    blank = Image.new("RGB", (_CELL, _CELL), "white")
    shown += [blank] * (-len(shown) % _COLUMNS)
    rows = [shown[first : first + _COLUMNS] for first in range(0, len(shown), _COLUMNS)]
    return grid(rows, [""] * _COLUMNS).quantize(_COLOURS)


def _outlined(scene: Scene) -> Image.Image:
    height, width, _ = scene.pixels.shape
    outlines = [Outline("bbox", _bins(one.box, width, height), NAMES[one.digit], "lime") for one in scene.digits]
    drawn = draw_outlines(Image.fromarray(scene.pixels), outlines, width=_CELL * width // max(width, height))
    cell = Image.new("RGB", (_CELL, _CELL), "white")
    cell.paste(drawn, ((_CELL - drawn.width) // 2, (_CELL - drawn.height) // 2))
    return cell


def _bins(box: tuple[int, int, int, int], width: int, height: int) -> tuple[int, ...]:
    left, top, right, bottom = box
    return to_bin(left, width), to_bin(top, height), to_bin(right, width), to_bin(bottom, height)
