"""What is odd about the pixels of an image that can be read: it has one colour, or transparency hides all of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import cast

from PIL import Image

from stage2_trainer.data.images import ImageError, displayed, is_hidden, open_image, open_source

HIDDEN = "an image that is transparent everywhere: its transparency is ignored"
ONE_COLOUR = "an image of one colour"
UNCOMPRESSED = frozenset({"BMP", "DIB", "PPM", "TIFF"})
LEAST_BYTES, PIXELS_A_BYTE = 4096, 32
"""A compressed file of one colour is no longer than the first, and a byte for so many pixels. A photograph is."""


def oddities(source: str) -> Iterator[str]:
    """Yield what a person should know of an image that can be read: HIDDEN, ONE_COLOUR.

    Only an image that has transparency, or few bytes for its size, is decoded.
    """
    with suppress(ImageError, OSError), open_source(source) as file:
        try:
            with open_image(file) as image:
                if image.has_transparency_data or _may_be_plain(image, file.seek(0, os.SEEK_END)):
                    file.seek(0)
                    yield from _oddities_of(image)
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001  # Pillow may raise anything for a broken file, which is noticed in training
            return


def _may_be_plain(image: Image.Image, length: int) -> bool:
    """Whether a file of this length may hold one colour."""
    return image.format in UNCOMPRESSED or length < LEAST_BYTES + image.width * image.height / PIXELS_A_BYTE


def _oddities_of(image: Image.Image) -> Iterator[str]:
    shown = displayed(image)
    if is_hidden(image):
        yield HIDDEN
    if all(low == high for low, high in cast("tuple[tuple[int, int], ...]", shown.getextrema())):
        yield ONE_COLOUR
