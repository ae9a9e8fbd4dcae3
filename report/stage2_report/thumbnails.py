"""Thumbnails of held-out images, as JPEG within the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import Record

SIDE = 480  # pixels, the longer one
UNITS = 400  # of the SVG, for the longer side: letters have one size in all pictures
QUALITIES = (78, 55, 35)
MOST_BYTES = 60_000


@dataclass(frozen=True)
class Thumbnail:
    """One image as the page shows it, or why it does not. width, height: in the SVG's units."""

    width: float
    height: float
    url: str = ""
    fault: str = ""


def thumbnail(record: Record, folder: Path | None) -> Thumbnail:
    """Return the first image of a record. folder: where images lie now, by name; None = where the record says."""
    width, height = record.width, record.height
    if not record.images:
        return Thumbnail(*_units(width, height), fault="the run's records do not name its image")
    path = Path(record.images[0])
    try:
        image = load_image(str(folder / path.name if folder else path))
    except ImageError as error:
        return Thumbnail(*_units(width, height), fault=str(error))
    image.thumbnail((SIDE, SIDE))
    encoded = b""
    for quality in QUALITIES:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality, optimize=True)
        encoded = file.getvalue()
        if len(encoded) <= MOST_BYTES:
            break
    return Thumbnail(*_units(*image.size), url=f"data:image/jpeg;base64,{base64.b64encode(encoded).decode()}")


def _units(width: int, height: int) -> tuple[float, float]:
    longest = max(width, height)
    return round(width * UNITS / longest, 1), round(max(height * UNITS / longest, 1.0), 1)
