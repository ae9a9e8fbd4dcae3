"""Draws objects on images: outlines with their descriptions, and grids of such pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from stage2_api.coordinates import BINS
from stage2_trainer.matching.parse import Kind

_MARGIN = 6
LONGEST = 200  # characters of a name that are drawn; more do not fit a picture, and are slow


@dataclass(frozen=True)
class Outline:
    """One object to draw: its coordinates in bins 0..999 (4 for a bbox, x and y in turn for a poly)."""

    kind: Kind
    bins: Sequence[int]
    label: str
    color: str


def draw_outlines(image: Image.Image, outlines: Sequence[Outline], *, width: int = 288) -> Image.Image:
    """Return a copy of the image, scaled to `width` pixels, with every object outlined and labelled."""
    height = round(image.height * width / image.width)
    canvas = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(canvas)
    font = ImageFont.load_default(size=11)
    for outline in outlines:
        points = _points(outline, width, height)
        draw.polygon(points, outline=outline.color, width=2)
        x, y = min(point[0] for point in points), max(0.0, min(point[1] for point in points) - 13)
        label = _one_line(outline.label)
        x = max(0.0, min(x + 1, width - draw.textlength(label, font=font)))
        draw.text((x, y), label, fill=outline.color, font=font, stroke_width=2, stroke_fill="white")
    return canvas


def grid(rows: Sequence[Sequence[Image.Image]], titles: Sequence[str]) -> Image.Image:
    """Return a table of pictures of equal size, with a title above each column."""
    cell_width, cell_height = rows[0][0].size
    head = 24
    size = (len(titles) * (cell_width + _MARGIN) + _MARGIN, head + len(rows) * (cell_height + _MARGIN) + _MARGIN)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column, title in enumerate(titles):
        draw.text((_MARGIN + column * (cell_width + _MARGIN), 5), title, fill="black", font=font)
    for line, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            place = (_MARGIN + column * (cell_width + _MARGIN), head + line * (cell_height + _MARGIN))
            sheet.paste(picture, place)
    return sheet


def captioned_page(cells: Sequence[tuple[Image.Image, str]], *, columns: int, width: int) -> Image.Image:
    """Return pictures, none wider than `width`, in rows as high as their highest, with a caption above each."""
    head = 20
    rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
    heights = [max(picture.height for picture, _ in row) + head for row in rows]
    shape = min(columns, len(cells)) * (width + _MARGIN) + _MARGIN, sum(heights) + (len(rows) + 1) * _MARGIN
    sheet = Image.new("RGB", shape, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    top = _MARGIN
    for row, height in zip(rows, heights, strict=True):
        for column, (picture, caption) in enumerate(row):
            left = _MARGIN + column * (width + _MARGIN)
            draw.text((left, top + 2), _cut(_one_line(caption), font, width), fill="black", font=font)
            sheet.paste(picture, (left, top + head))
        top += height + _MARGIN
    return sheet


def _one_line(text: str) -> str:
    """Return the beginning of a text, escaped if it has line breaks, which Pillow refuses, or invisible characters."""
    shown = text[:LONGEST]
    return shown if shown.isprintable() else repr(shown)[1:-1]


def _cut(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
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
    return [(x * width / BINS, y * height / BINS) for x, y in corners]
