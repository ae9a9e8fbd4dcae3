"""The digest of `digest` on a CPU, compiled for it at the first use: each word is read once, and nothing is written.

numba is imported with this module, and compiling takes a second: `digest` imports it when that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stage2_trainer.sync.tensors.splitmix import GOLDEN, LOWER_HALF, MULTIPLIER

Words = NDArray[np.int64]
_GOLDEN, _MULTIPLIER, _LOWER_HALF = np.int64(GOLDEN), np.int64(MULTIPLIER), np.int64(LOWER_HALF)
_HALF = np.int64(32)
_compiled = cast(Callable[[Callable[..., Any]], Callable[..., Any]], njit(nogil=True))


@_compiled
def _folded(word: np.int64) -> np.int64:
    return word ^ ((word >> _HALF) & _LOWER_HALF)


@_compiled
def sum_of_pieces(words: Words, multipliers: Words, first: int) -> np.int64:
    """Return the sum of the mixed sums of pieces, of which the first has this number; modulo 2^64."""
    total = np.int64(0)
    for start in range(0, len(words), len(multipliers)):
        piece = words[start : start + len(multipliers)]
        found = np.int64(0)
        for i in range(len(piece)):
            found += piece[i] * multipliers[i]
        found += np.int64(first + start // len(multipliers)) * _GOLDEN
        total += _folded(_folded(found) * _MULTIPLIER)
    return total
