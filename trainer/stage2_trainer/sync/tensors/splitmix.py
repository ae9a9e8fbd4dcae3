"""Whole numbers of 64 bits, mixed as splitmix64 mixes them: the same on every device."""

from __future__ import annotations

from torch import Tensor

# 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9, as torch's signed numbers
GOLDEN, MULTIPLIER = -7046029254386353131, -4658895280553007687
LOWER_HALF = 2**32 - 1


def mixed(words: Tensor) -> Tensor:
    """Spread each number over its 64 bits; no two numbers become the same."""
    words = _folded(words) * MULTIPLIER
    return _folded(words)


def _folded(words: Tensor) -> Tensor:
    return words ^ ((words >> 32) & LOWER_HALF)
