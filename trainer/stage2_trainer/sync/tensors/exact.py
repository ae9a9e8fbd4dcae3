"""Arithmetic that has the same bits on every device: sums on a grid of float64, and mixing of 64-bit integers.

Rounded to multiples of one power of two, numbers are so few and so small that their sums are exact in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGNIFICAND_BITS = 53  # whole numbers up to 2^53 are exact in float64
EXPONENT_MASK = 0x7FF << 52
PLACE_OF_UNITS = 1.5 * 2.0**52  # what is added to it is rounded to whole numbers
SMALLEST_POWER = 2.0**-900  # stands for zero, so that a row of zeros divides by something

# splitmix64's 0x9E3779B97F4A7C15 and 0xBF58476D1CE4E5B9, as torch's signed numbers
GOLDEN, MULTIPLIER = -7046029254386353131, -4658895280553007687
LOWER_HALF = 2**32 - 1


def on_grid(values: Tensor, bits: int, *, dim: int) -> Tensor:
    """Round to multiples of one power of two along `dim`; the largest value keeps `bits` bits."""
    step = power_of_two(values, dim=dim) * 2.0 ** (1 - bits)
    place = step * PLACE_OF_UNITS
    return values.add(place).sub_(place)  # the first sum is rounded to whole steps, the second is exact


def power_of_two(values: Tensor, *, dim: int) -> Tensor:
    """Return the power of two at or below the largest value along `dim`."""
    largest = values.abs().amax(dim, keepdim=True)
    return (largest.view(torch.int64) & EXPONENT_MASK).view(torch.float64).clamp_min(SMALLEST_POWER)


def mixed(words: Tensor) -> Tensor:
    """Spread each integer over its 64 bits, as splitmix64 does; different integers stay different."""
    return _folded(_folded(words) * MULTIPLIER)


def _folded(words: Tensor) -> Tensor:
    return words ^ ((words >> 32) & LOWER_HALF)
