"""The merge of an adapter into a base weight, with the same bits on every device and with any number of threads.

Learner and server both merge, and their results are compared byte for byte. Of all operations only sums depend on the
order in which they are made, and that order changes with threads, tiles and devices. Here every sum is of whole
multiples of one power of two, so few and so small that float64 holds each partial sum exactly; and every other step is
one operation that IEEE 754 rounds correctly. So the order cannot be seen, and tiles may be of any size.

The multiples are fine: what is lost is far below the rounding of the float32 result (`tests` compare with exact sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIGNIFICAND_BITS = 53  # whole numbers up to 2^53 are exact in float64
EXPONENT_MASK = 0x7FF << 52
PLACE_OF_UNITS = 1.5 * 2.0**52  # what is added to it is rounded to whole numbers
SMALLEST_POWER = 2.0**-900  # stands for zero, so that a row of zeros divides by something
TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}  # the first stays in a core's cache, the second keeps a GPU busy


@dataclass(frozen=True)
class Adapter:
    """An adapter of one weight of shape (out, in), in the field's letters: W + s B A, or m (W + s B A) / ||W + s B A||.

    up: B, shape (out, rank). down: A, shape (rank, in). scaling: s. magnitude: m of DoRA, shape (out,); None = LoRA.
    """

    up: Tensor
    down: Tensor
    scaling: float
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class TrainedRows:
    """Rows that train in the place of a table's own. ids: which K rows; rows (K, in): their values."""

    ids: Sequence[int]
    rows: Tensor


Change = Adapter | TrainedRows
"""A change of one weight, beside it."""


@torch.no_grad()
def merged_weight(base: Tensor, change: Change) -> Tensor:
    """Return the merged weight in float32, shape (out, in) (LoRA: arXiv 2106.09685; DoRA: arXiv 2402.09353).

    DoRA's norms are by output row. An embedding is merged alike, its rows being the vocabulary.
    """
    if isinstance(change, TrainedRows):
        ids = torch.tensor(change.ids, device=base.device)
        return base.float().index_copy(0, ids, change.rows.to(base.device, torch.float32))
    return _with_adapter(base, change)


def _with_adapter(base: Tensor, adapter: Adapter) -> Tensor:
    up, down = _factors(adapter)
    merged = torch.empty(base.shape, dtype=torch.float32, device=base.device)
    rows = max(1, TILE_ELEMENTS[base.device.type] // base.shape[1])
    for start in range(0, len(base), rows):
        tile = slice(start, start + rows)
        direction = (up[tile] @ down).add_(base[tile].double())
        if adapter.magnitude is not None:
            direction.mul_((adapter.magnitude[tile].double() / _row_norms(direction)).unsqueeze(1))
        merged[tile] = direction
    return merged


def _factors(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return s B and A in float64, their product unchanged, such that every sum in it is exact.

    What a rank has large in A and small in B is moved to A first, or the common step of a row of B would be too coarse.
    """
    bits = (SIGNIFICAND_BITS - adapter.down.shape[0].bit_length()) // 2
    up, down = adapter.up.double() * adapter.scaling, adapter.down.double()
    size = _power_of_two(up, dim=0)
    return _on_grid(up / size, bits, dim=1), _on_grid(down * size.T, bits, dim=0)


def _row_norms(matrix: Tensor) -> Tensor:
    bits = SIGNIFICAND_BITS - matrix.shape[1].bit_length()
    return _on_grid(matrix.square(), bits, dim=1).sum(1).sqrt()


def _on_grid(values: Tensor, bits: int, *, dim: int) -> Tensor:
    """Round to multiples of one power of two along `dim`; the largest value is kept to `bits` bits."""
    step = _power_of_two(values, dim=dim) * 2.0 ** (1 - bits)
    place = step * PLACE_OF_UNITS
    return values.add(place).sub_(place)  # the first sum is rounded to whole steps, the second is exact


def _power_of_two(values: Tensor, *, dim: int) -> Tensor:
    """Return the power of two at or below the largest value along `dim`."""
    largest = values.abs().amax(dim, keepdim=True)
    return (largest.view(torch.int64) & EXPONENT_MASK).view(torch.float64).clamp_min(SMALLEST_POWER)
