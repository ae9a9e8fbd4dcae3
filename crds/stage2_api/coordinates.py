"""Coordinates: width and height of an image are divided into 1000 bins each, and every bin has a token."""

from __future__ import annotations

import re
from typing import Final

BINS: Final = 1000
"""Bins along each side of an image."""

MAX_BIN: Final = BINS - 1
"""Last bin; the first is 0."""

COORD_TOKEN: Final = re.compile(r"<\|coord_(0|[1-9][0-9]{0,2})\|>")
"""One coordinate token; its group is the bin."""


def coord_token(bin_index: int) -> str:
    """Return the text of one coordinate token, `<|coord_k|>`."""
    return f"<|coord_{bin_index}|>"


_BIN_OF: Final = {coord_token(index): index for index in range(BINS)}


def coord_bin(text: str) -> int | None:
    """Return the bin 0..999 that `text` names when it is exactly one coordinate token, else None."""
    return _BIN_OF.get(text)


def to_bin(value: float, size: int) -> int:
    """Return the bin of a pixel coordinate on an axis of `size` pixels."""
    return min(MAX_BIN, max(0, round(value / size * BINS)))
