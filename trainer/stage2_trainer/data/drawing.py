"""Draws objects on images: outlines with their descriptions, and grids of such pictures.

Names in other scripts than Latin are drawn with the fonts of this machine. A name for which it has no font is written
as code points.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from stage2_api.coordinates import BINS
from stage2_trainer.matching.parse import Kind

_MARGIN = 6
_LINE = 13  # pixels of a name's height
_TALLEST = 2  # times as high as wide
_CASING = 3  # pixels of the white line below an outline; one of them is seen outside
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
LONGEST = 200  # characters of a name that are drawn; more do not fit a picture, and are slow


@dataclass(frozen=True)
class Outline:
    """One object to draw: its coordinates in bins 0..999 (4 for a bbox, x and y in turn for a poly)."""

    kind: Kind
    bins: Sequence[int]
    label: str
    color: str


def draw_outlines(image: Image.Image, outlines: Sequence[Outline], *, width: int = 288) -> Image.Image:
    """Return the image, `width` pixels wide, with every object outlined (white outside) and labelled.

    An image that would get more than twice as high stays narrower, with white beside it for the names.
    """
    scale = min(width / image.width, _TALLEST * width / image.height)
    shown, height = (max(1, round(side * scale)) for side in image.size)
    canvas = Image.new("RGB", (width, max(height, _LINE)), "white")
    canvas.paste(image.convert("RGB").resize((shown, height), Image.Resampling.BICUBIC))
    draw = ImageDraw.Draw(canvas)
    for outline in outlines:
        points = _points(outline, shown, height)
        draw.line([*points, *points[:2]], fill="white", width=_CASING)  # a red box is seen on red, too
        draw.polygon(points, outline=outline.color, width=2)
        x, y = min(point[0] for point in points), max(0.0, min(point[1] for point in points) - _LINE)
        label, font = _drawable(outline.label, 11)
        x = max(0.0, min(x + 1, width - draw.textlength(label, font=font)))
        draw.text((x, y), label, fill=outline.color, font=font, stroke_width=2, stroke_fill="white")
    return canvas


def draw_bar(share: float, label: str, color: str, *, width: int = 288) -> Image.Image:
    """Return a horizontal bar that fills a share (0 to 1) of `width` pixels, with a label below it."""
    canvas = Image.new("RGB", (width, 38), "white")
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((0, 0, width - 1, 15), fill="#eaeef2")
    if filled := round(share * width):
        draw.rectangle((0, 0, filled - 1, 15), fill=color)
    draw.text((0, 20), label, fill="black", font=ImageFont.load_default(size=13))
    return canvas


def draw_lines(lines: Sequence[tuple[str, str]], *, width: int = 288) -> Image.Image:
    """Return texts in their colors: the first on a line of its own, the others on one line below it."""
    canvas = Image.new("RGB", (width, 38), "white")
    draw, font, left = ImageDraw.Draw(canvas), ImageFont.load_default(size=12), 0.0
    draw.text((0, 0), lines[0][0], fill=lines[0][1], font=font)
    for text, color in lines[1:]:
        draw.text((left, 20), text, fill=color, font=font)
        left += draw.textlength(f"{text}   ", font=font)
    return canvas


def grid(rows: Sequence[Sequence[Image.Image]], titles: Sequence[str]) -> Image.Image:
    """Return a table of pictures with titles. Columns are equally wide, and each row is as high as its highest."""
    width = max(picture.width for pictures in rows for picture in pictures)
    heights = [max(picture.height for picture in pictures) + _MARGIN for pictures in rows]
    head = 24
    sheet = Image.new("RGB", (len(titles) * (width + _MARGIN) + _MARGIN, head + sum(heights) + _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        text, font = _drawable(title, 14)
        draw.text((_MARGIN + column * (width + _MARGIN), 5), _cut(text, font, width), fill="black", font=font)
    top = head
    for pictures, height in zip(rows, heights, strict=True):
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (_MARGIN + column * (width + _MARGIN), top))
        top += height
    return sheet


def captioned_page(cells: Sequence[tuple[Image.Image, str]], *, columns: int, width: int) -> Image.Image:
    """Return pictures, none wider than `width`, in rows as high as their highest, with a caption above each."""
    head = 20
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(picture.height for picture, _ in row) + head for row in rows]
    shape = min(columns, len(cells)) * (width + _MARGIN) + _MARGIN, sum(heights) + (len(rows) + 1) * _MARGIN
    sheet = Image.new("RGB", shape, "white")
    draw = ImageDraw.Draw(sheet)
    top = _MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, (picture, caption) in enumerate(row):
            left = _MARGIN + column * (width + _MARGIN)
            text, font = _drawable(caption, 12)
            draw.text((left, top + 2), _cut(text, font, width), fill="black", font=font)
            sheet.paste(picture, (left, top + head))
        top += height + _MARGIN
    return sheet


def _drawable(text: str, size: int) -> tuple[str, _Font]:
    """Return the beginning of a text as it can be drawn, and a font that has all its characters.

    Line breaks, which Pillow refuses, and invisible characters are escaped; all others where no font has them.
    """
    shown = text[:LONGEST]
    shown = shown if shown.isprintable() else repr(shown)[1:-1]
    if shown.isascii():
        return shown, ImageFont.load_default(size=size)
    characters = set(map(ord, shown))
    for path in _font_files():
        if characters <= _characters(path):
            return shown, ImageFont.truetype(path, size=size)
    return shown.encode("ascii", "backslashreplace").decode(), ImageFont.load_default(size=size)


@cache
def _font_files() -> Sequence[str]:
    """Return the upright fonts of this machine, and first matplotlib's own: it has Latin, Greek and Cyrillic."""
    from matplotlib import font_manager  # it takes half a second, which names in Latin need not

    own = font_manager.findfont("DejaVu Sans")
    fonts = (one for one in font_manager.fontManager.ttflist if one.style == "normal" and one.weight == 400)
    upright = {one.fname for one in fonts if not one.name.startswith("Last Resort")}  # it has frames for all characters
    return [own, *sorted(upright - {own})]


@cache
def _characters(path: str) -> Set[int]:
    from matplotlib.ft2font import FT2Font

    return FT2Font(path).get_charmap().keys()


def _cut(text: str, font: _Font, width: int) -> str:
    """Return a text, shortened at its beginning to fit the width."""
    shown = text
    while font.getlength(shown) > width and len(shown) > 1:
        text = text[1:]
        shown = f"…{text}"
    return shown


def _points(outline: Outline, width: int, height: int) -> list[tuple[float, float]]:
    if outline.kind == "bbox":
        x1, y1, x2, y2 = outline.bins
        corners = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
    else:
        corners = list(zip(outline.bins[0::2], outline.bins[1::2], strict=True))
    return [(_within(x * width / BINS, width), _within(y * height / BINS, height)) for x, y in corners]


def _within(place: float, side: int) -> float:
    """Return a place with a pixel left for the white line, if the picture has one."""
    return min(max(place, 1.0), max(1.0, side - 2.0))
