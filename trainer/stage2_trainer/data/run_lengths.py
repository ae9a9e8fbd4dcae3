"""COCO's run lengths of a mask: column by column, background first, as a list or as a compressed string."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_NUMBER = 12  # characters of 5 bits each


def run_lengths(counts: str | bytes | Sequence[int], pixels: int) -> list[int]:
    """Return the run lengths of a mask. Raises ValueError where they do not cover its pixels."""
    runs = list(counts) if not isinstance(counts, str | bytes) else _uncompressed(counts)
    if sum(runs) != pixels or min(runs, default=0) < 0:
        raise ValueError(f"{len(runs)} run lengths cover {sum(runs)} of {pixels} pixels")
    return runs


def _uncompressed(counts: str | bytes) -> list[int]:
    """Return run lengths from COCO's string: 5 bits a character from 48 on, differences to the run two before."""
    text = counts.encode() if isinstance(counts, str) else counts
    runs: list[int] = []
    position = 0
    while position < len(text):
        value, shift, more = 0, 0, True
        while more:
            if position == len(text):
                raise ValueError("the run lengths end within a number")
            if shift == 5 * LONGEST_NUMBER:
                raise ValueError("a number is longer than any mask needs")
            byte = text[position] - 48
            value |= (byte & 0x1F) << shift
            more = bool(byte & 0x20)
            shift += 5
            position += 1
            if not more and byte & 0x10:
                value |= -1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs
