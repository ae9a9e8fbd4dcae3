"""The merge of `merge_math` on a CPU, compiled for it at the first use: of a few rows at a time, which a cache holds.

It has the same bits, since each sum is exact, in whatever order, and every other step is the same operation, rounded
once. So nothing here may be reordered or fused where it is rounded; only the product is exact, and may be (`contract`).
bfloat16 is read and written as it is in memory, so that a base weight passes once through the cache and back.
numba is imported with this module, and compiling takes seconds: `merge_math` imports it when that pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from stage2_trainer.sync.tensors.exact import (
    EXPONENT_MASK,
    GOLDEN,
    MULTIPLIER,
    PLACE_OF_UNITS,
    SIGNIFICAND_BITS,
    SMALLEST_POWER,
)

Doubles = NDArray[np.float64]
Weights = NDArray[np.float32] | NDArray[np.uint16]
"""float32, or the bits of bfloat16."""
Compiled = TypeVar("Compiled", bound=Callable[..., Any])

RANKS_AT_ONCE, ROWS_AT_ONCE = 8, 2  # what registers hold: more is not faster
COLUMNS = 256  # of which the first cache holds eight rows of A
SCRATCH = 2**15  # numbers of the product; they stay in the second cache
WITHOUT_SIGN = np.int64(2**63 - 1)
HALF, ONE, DROPPED, NAN = np.uint32(0x7FFF), np.uint32(1), np.uint32(16), np.uint32(0x7FC0)  # of bfloat16
FINITE = np.uint32(0x7F800000)  # a float32 with all of these bits is none
EXPONENT = np.int64(EXPONENT_MASK)
WORD = 2**64
STRIDE, TWICE_MIXED = np.uint64(GOLDEN % WORD), np.uint64(MULTIPLIER**2 % WORD)
HALF_WORD, ALL_BUT_NOISE = np.uint64(32), np.uint64(48)


class MergeKernel:
    """The merge of one adapter, called for any rows of it, from any number of threads at once.

    up: s B, shape (out, rank), and down: A, shape (rank, in), as `merge_math` has them on their grids; in > 1, or no
    bit is left between the grid and the place of units. magnitude: m of DoRA, shape (out,); None = LoRA.
    key: of the noise with which bfloat16 is rounded (`rounding`); None = to the nearest.
    """

    def __init__(self, up: Doubles, down: Doubles, magnitude: Doubles | None, key: int | None = None) -> None:
        ranks = up.shape[1] + -up.shape[1] % RANKS_AT_ONCE  # zeros add nothing
        self._up = _filled_up(up, (len(up) + len(up) % ROWS_AT_ONCE, ranks))
        self._down = _in_columns(down, ranks)
        self._magnitude = np.empty(0) if magnitude is None else magnitude
        self._width = down.shape[1]
        self._key = key

    def merge(self, start: int, base: Weights, merged: Weights) -> None:
        """Merge into the rows of `base` from `start` (an even number) on; `merged` has its shape."""
        rows = max(1, SCRATCH // self._width // ROWS_AT_ONCE) * ROWS_AT_ONCE
        scratch = np.empty((rows, self._width))
        up = self._up[start : start + len(base) + len(base) % ROWS_AT_ONCE]
        merge = MERGES[base.dtype.char, merged.dtype.char, self._key is not None]
        noise = np.array([start * self._width, (self._key or 0) % WORD], np.uint64)
        merge(base, up, self._down, self._magnitude[start : start + len(base)], scratch, noise, merged)


def _in_columns(down: Doubles, ranks: int) -> Doubles:
    """Return A cut into groups of columns, shape (groups, ranks, columns), filled up with zeros.

    Each lies in one piece: rows of A that are a power of two apart would take each other's place in the cache.
    """
    width = down.shape[1] + -down.shape[1] % COLUMNS
    return np.ascontiguousarray(_filled_up(down, (ranks, width)).reshape(ranks, -1, COLUMNS).transpose(1, 0, 2))


def _filled_up(matrix: Doubles, shape: tuple[int, int]) -> Doubles:
    filled = np.zeros(shape)
    filled[: matrix.shape[0], : matrix.shape[1]] = matrix
    return filled


def _compiled(*, exact: bool = False) -> Callable[[Compiled], Compiled]:
    """Return a decorator. exact: whether no sum of the function is rounded, so that it may be fused with a product."""
    decorator: Any = njit(nogil=True, error_model="numpy", fastmath={"contract"} if exact else False)
    return cast(Callable[[Compiled], Compiled], decorator)


@_compiled()
def _power_of_two(bits: np.int64) -> float:
    """Return the power of two at or below what has these bits, of numbers that are not negative."""
    return float(max(np.int64(bits & EXPONENT).view(np.float64), SMALLEST_POWER))


@_compiled()
def _bits(value: float) -> np.int64:
    """Return a number's bits without its sign; without signs they are in the order of the numbers."""
    return np.float64(value).view(np.int64) & WITHOUT_SIGN


@_compiled()
def put_on_grid(up: Doubles, down: Doubles, bits: int) -> None:
    """Move the size of each rank to A and round both factors to their grids, in place, as `merge_math` does."""
    of_ranks, of_columns = np.zeros(len(down), np.int64), np.zeros(down.shape[1], np.int64)
    for r in range(len(up)):
        for k in range(len(down)):
            of_ranks[k] = max(of_ranks[k], _bits(up[r, k]))
    fine = 2.0 ** (1 - bits)
    for r in range(len(up)):
        largest = np.int64(0)
        for k in range(len(down)):
            up[r, k] /= _power_of_two(of_ranks[k])
            largest = max(largest, _bits(up[r, k]))
        place = _power_of_two(largest) * fine * PLACE_OF_UNITS
        for k in range(len(down)):
            up[r, k] = (up[r, k] + place) - place
    for k in range(len(down)):
        size = _power_of_two(of_ranks[k])
        for i in range(down.shape[1]):
            down[k, i] *= size
            of_columns[i] = max(of_columns[i], _bits(down[k, i]))
    for k in range(len(down)):
        for i in range(down.shape[1]):
            place = _power_of_two(of_columns[i]) * fine * PLACE_OF_UNITS
            down[k, i] = (down[k, i] + place) - place


@_compiled()
def norm(row: Doubles) -> float:
    """Return the norm of a row, as `merge_math` sums it up on a grid."""
    largest = np.int64(0)
    for i in range(len(row)):
        largest = max(largest, _bits(row[i] * row[i]))
    power = _power_of_two(largest)
    bits, width = SIGNIFICAND_BITS, len(row)
    while width:
        bits, width = bits - 1, width >> 1
    step = power * 2.0 ** (1 - bits)
    place = step * PLACE_OF_UNITS
    if not np.isfinite(place):
        return np.nan
    # what is added to the place of units counts steps in its last bits, and whole numbers may be added in any order
    steps = np.int64(0)
    units = np.float64(place).view(np.int64)
    for i in range(len(row)):
        steps += np.float64(row[i] * row[i] + place).view(np.int64) - units
    return float(np.sqrt(steps * step))


@_compiled()
def _as_it_is(value: float) -> float:
    return value


@_compiled()
def _written_as_it_is(value: float, place: int, key: int) -> float:
    return value


@_compiled()
def _from_bfloat16(bits: int) -> float:
    return float(np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32))


@_compiled()
def _to_bfloat16(value: float, place: int, key: int) -> int:
    """Round to float32, and that to the nearest bfloat16, the even one of two that are as near."""
    bits = np.float32(value).view(np.uint32)
    rounded = np.uint32(bits + HALF + ((bits >> DROPPED) & ONE)) >> DROPPED
    return int(np.uint16(rounded if value == value else NAN))  # a NaN is not equal to itself


@_compiled()
def _up_or_down(value: float, place: int, key: int) -> int:
    """Round to float32, and that to one of the two bfloat16 beside it, as `rounding` does at this place.

    There words are mixed twice. The first mixing ends with the folding with which the second begins, and to fold twice
    is to do nothing; the last one leaves the highest bits as they are. One product by the multiplier's square remains.
    """
    word = np.uint64(np.uint64(place) * STRIDE + np.uint64(key))
    noise = np.uint64((word ^ (word >> HALF_WORD)) * TWICE_MIXED) >> ALL_BUT_NOISE
    bits = np.float32(value).view(np.uint32)
    moved = np.uint32(np.uint32(bits + np.uint32(noise)) >> DROPPED)
    finite = (bits & FINITE) != FINITE
    return int(np.uint16(moved if finite else (bits >> DROPPED if value == value else NAN)))


def _merge_of(read: Any, write: Any) -> Any:
    """Return the merge of rows whose numbers are read and written by these functions.

    noise: the place of the first number of `base` in the whole weight, and the key.
    """

    @_compiled()
    def lora_row(direction: Doubles, base: Weights, place: int, key: int, merged: Weights) -> None:
        for i in range(len(base)):
            merged[i] = write(direction[i] + read(base[i]), place + np.uint64(i), key)

    @_compiled()
    def dora_row(direction: Doubles, base: Weights, magnitude: float, place: int, key: int, merged: Weights) -> None:
        for i in range(len(base)):
            direction[i] += read(base[i])
        scale = magnitude / norm(direction)
        for i in range(len(base)):
            merged[i] = write(direction[i] * scale, place + np.uint64(i), key)

    @_compiled()
    def merge(
        base: Weights,
        up: Doubles,
        down: Doubles,
        magnitude: Doubles,
        scratch: Doubles,
        noise: NDArray[np.uint64],
        merged: Weights,
    ) -> None:
        first, key = noise
        for start in range(0, len(base), len(scratch)):
            count = min(len(scratch), len(base) - start)
            even = count + count % ROWS_AT_ONCE
            _product(up[start : start + even], down, scratch[:even])
            for r in range(count):
                row = start + r
                place = first + np.uint64(row) * np.uint64(base.shape[1])
                if len(magnitude):
                    dora_row(scratch[r], base[row], magnitude[row], place, key, merged[row])
                else:
                    lora_row(scratch[r], base[row], place, key, merged[row])

    return merge


@_compiled(exact=True)
def _product(up: Doubles, down: Doubles, product: Doubles) -> None:
    for group in range(len(down)):
        start = group * down.shape[2]
        width = min(down.shape[2], product.shape[1] - start)
        for r in range(0, len(product), ROWS_AT_ONCE):
            _two_rows(up[r], up[r + 1], down[group], product[r, start:][:width], product[r + 1, start:][:width])


@_compiled(exact=True)
def _two_rows(b: Doubles, c: Doubles, a: Doubles, of_b: Doubles, of_c: Doubles) -> None:
    """Two rows of the product: what is read of A is used twice."""
    of_b[:] = 0
    of_c[:] = 0
    for k in range(0, len(b), RANKS_AT_ONCE):
        b0, b1, b2, b3, b4, b5, b6, b7 = b[k], b[k + 1], b[k + 2], b[k + 3], b[k + 4], b[k + 5], b[k + 6], b[k + 7]
        c0, c1, c2, c3, c4, c5, c6, c7 = c[k], c[k + 1], c[k + 2], c[k + 3], c[k + 4], c[k + 5], c[k + 6], c[k + 7]
        a0, a1, a2, a3, a4, a5, a6, a7 = a[k], a[k + 1], a[k + 2], a[k + 3], a[k + 4], a[k + 5], a[k + 6], a[k + 7]
        for i in range(len(of_b)):
            x0, x1, x2, x3, x4, x5, x6, x7 = a0[i], a1[i], a2[i], a3[i], a4[i], a5[i], a6[i], a7[i]
            of_b[i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3 + b4 * x4 + b5 * x5 + b6 * x6 + b7 * x7
            of_c[i] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3 + c4 * x4 + c5 * x5 + c6 * x6 + c7 * x7


FLOAT32, BFLOAT16 = np.dtype(np.float32).char, np.dtype(np.uint16).char
MERGES = {
    (FLOAT32, FLOAT32, False): _merge_of(_as_it_is, _written_as_it_is),
    (BFLOAT16, FLOAT32, False): _merge_of(_from_bfloat16, _written_as_it_is),
    (BFLOAT16, BFLOAT16, False): _merge_of(_from_bfloat16, _to_bfloat16),
    (BFLOAT16, BFLOAT16, True): _merge_of(_from_bfloat16, _up_or_down),
}
"""The merge of each dtype of base and result, rounded to the nearest or up or down."""
