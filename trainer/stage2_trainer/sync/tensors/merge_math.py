"""The merge of an adapter into a base weight and its rounding: the same bits on every device, with any threads.

Learner and server both merge, and their results are compared byte for byte. Only sums depend on the order of their
operations, and that order changes with threads, tiles and devices. So every sum here is of whole multiples of one power
of two, few and small enough that float64 holds each partial sum exactly (`on_grid`); every other step is one operation
that IEEE 754 rounds correctly. Tiles may therefore have any size. The multiples are fine: what they lose is far below
the rounding of the float32 result (tests compare with exact sums).

A merged weight moves by less than half a step of bfloat16 while an adapter is young, so rounding to the nearest value
returns the base: what was learnt is not served. Stochastic rounding goes up or down with probabilities that make the
mean right: over many weights just the update's size is served, with noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage2_api.vllm import SyncRounding
from stage2_trainer.sync.tensors.digest import GOLDEN, mixed

SIGNIFICAND_BITS = 53  # whole numbers up to 2^53 are exact in float64
EXPONENT_MASK = 0x7FF << 52
PLACE_OF_UNITS = 1.5 * 2.0**52  # what is added to it is rounded to whole numbers
SMALLEST_POWER = 2.0**-900  # stands for zero, so that a row of zeros divides by something

DROPPED_BITS = 16  # of a float32, so that a bfloat16 is left
SAMPLED_ROWS = 16  # one row of so many is measured
EXPECTED_NOISE = 2.0**-20  # of a base weight: a DoRA that has not moved differs from its base by float32 rounding
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
    """Rows that replace some of a table's. ids: which K rows; rows (K, in): their values."""

    ids: Sequence[int]
    rows: Tensor


Change = Adapter | TrainedRows
"""A change of one weight, kept beside it."""


def rounding_for(mode: SyncRounding, version: int) -> int | None:
    """Return the rule of rounding for one version's weights: what seeds stochastic rounding; None = to the nearest.

    Equal rules, names and values give equal bytes, on every device.
    """
    return version if mode == "stochastic" else None


@torch.no_grad()
def write_rounded(rounding: int | None, name: str, value: Tensor, rounded: Tensor, *, first: int = 0) -> None:
    """Round a tensor, or the piece of one that starts at its element `first`, into the contiguous `rounded`."""
    if rounding is None or rounded.dtype != torch.bfloat16 or value.dtype != torch.float32:
        rounded.copy_(value)
        return
    digest = hashlib.blake2b(f"{rounding}|{name}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "big", signed=True)
    source, target = value.contiguous().view(-1), rounded.view(-1)
    step = TILE_ELEMENTS[value.device.type]
    for start in range(0, len(source), step):
        piece = source[start : start + step]
        noise = _noise(first + start, len(piece), key, value.device)
        target[start : start + step] = _up_or_down(piece, noise)


@torch.no_grad()
def kept_sums(base: Tensor, merged: Tensor, served: Tensor) -> Tensor:
    """Return what `kept_share` needs of the sampled rows of one weight: as the base has them, merged, and as served."""
    start = base.float().flatten()
    update, survived = (end.flatten() - start for end in (merged, served))
    return torch.stack([survived.dot(update), update.dot(update), start.dot(start)])


def kept_share(sums: Sequence[Tensor]) -> float | None:
    """Return the share of an update that survives the rounding to the served dtype; None where nothing has moved.

    With W0 the base weight, W the merged one in float32 and W' the served one, it is <W' - W0, W - W0> / ||W - W0||^2:
    the length of the served update along the trained one. 1 = all of it, 0 = servers answer with the base. Every 16th
    row of each merged weight counts.
    """
    if not sums:
        return None
    along, trained, base = torch.stack([one.cpu().double() for one in sums]).sum(0).tolist()
    return None if trained <= EXPECTED_NOISE**2 * base else along / trained


@torch.no_grad()
def served_weight(
    name: str, base: Tensor, change: Change, rounding: int | None, kept: list[Tensor] | None = None
) -> Tensor:
    """Return the merged weight as it is served, in the base's dtype. kept: gets what `kept_share` needs of it."""
    served, sampled = _empty_like(base), []
    for rows, tile in merged_tiles(base, change):
        write_rounded(rounding, name, tile, served[rows], first=rows.start * base.shape[1])
        if kept is not None:
            sampled.append(tile[-rows.start % SAMPLED_ROWS :: SAMPLED_ROWS].clone())
    if kept is not None and sampled:
        kept.append(kept_sums(base[::SAMPLED_ROWS], torch.cat(sampled), served[::SAMPLED_ROWS]))
    return served


def merged_tiles(base: Tensor, change: Change) -> Iterator[tuple[slice, Tensor]]:
    """Yield the merged weight piece by piece: which rows, and their values in float32, valid until the next piece.

    LoRA: arXiv 2106.09685; DoRA, whose norms are by output row: arXiv 2402.09353. An embedding is merged alike, its
    rows being the vocabulary; a table with trained rows is one piece. Only a piece is held in float32, because fresh
    memory costs as much as the merge. The caller switches gradients off.
    """
    if isinstance(change, TrainedRows):
        ids = torch.tensor(change.ids, device=base.device)
        table = base.to(torch.float32, copy=True)
        yield slice(0, len(base)), table.index_copy_(0, ids, change.rows.to(base.device, torch.float32))
    else:
        yield from _merged_adapter(base, change)


def _merged_adapter(base: Tensor, adapter: Adapter) -> Iterator[tuple[slice, Tensor]]:
    up, down = _factors(adapter)
    rows = max(1, TILE_ELEMENTS[base.device.type] // base.shape[1])
    for start in range(0, len(base), rows):
        tile = slice(start, start + rows)
        direction = (up[tile] @ down).add_(0.0).add_(base[tile].double())  # the sign of a sum of zeros is a device's
        if adapter.magnitude is not None:
            direction.mul_((adapter.magnitude[tile].double() / _row_norms(direction)).unsqueeze(1))
        yield tile, direction.float()


def _factors(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return s B and A in float64, their product unchanged, such that every sum in it is exact.

    What a rank has large in A and small in B is moved to A first, or the common step of a row of B would be too coarse.
    """
    bits = (SIGNIFICAND_BITS - adapter.down.shape[0].bit_length()) // 2  # with which sums over the rank are exact
    up, down = adapter.up.double() * adapter.scaling, adapter.down.double()
    size = power_of_two(up, dim=0)
    return on_grid(up / size, bits, dim=1), on_grid(down * size.T, bits, dim=0)


def _row_norms(matrix: Tensor) -> Tensor:
    bits = SIGNIFICAND_BITS - matrix.shape[1].bit_length()
    return _root(on_grid(matrix.square(), bits, dim=1).sum(1))


def on_grid(values: Tensor, bits: int, *, dim: int) -> Tensor:
    """Round to multiples of one power of two along `dim`; the largest value keeps `bits` bits.

    They are so few and so small that their sums are exact in any order.
    """
    step = power_of_two(values, dim=dim) * 2.0 ** (1 - bits)
    place = step * PLACE_OF_UNITS
    return values.add(place).sub_(place)  # the first sum is rounded to whole steps, the second is exact


def power_of_two(values: Tensor, *, dim: int) -> Tensor:
    """Return the power of two at or below the largest value along `dim`."""
    largest = values.abs().amax(dim, keepdim=True)
    return (largest.view(torch.int64) & EXPONENT_MASK).view(torch.float64).clamp_min(SMALLEST_POWER)


def _root(values: Tensor) -> Tensor:
    """Return square roots, rounded correctly: torch's own are MKL's on a CPU, one in a hundred off by its last bit."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same shape, dtype and device.

    numpy asks for huge pages: the first touch of small ones takes as long as the merge of their contents.
    """
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape)


def _up_or_down(piece: Tensor, noise: Tensor) -> Tensor:
    """Add noise below the last bit that is kept, and drop everything below it; infinities and NaN stay."""
    kept = (piece.view(torch.int32) + noise) & (-1 << DROPPED_BITS)
    return torch.where(piece.isfinite(), kept.view(torch.float32), piece).to(torch.bfloat16)


def _noise(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return 16-bit numbers for these positions of a sequence."""
    words = torch.arange(start, start + count, device=device).mul_(GOLDEN).add_(key)
    highest: Tensor = (mixed(mixed(words)) >> (64 - DROPPED_BITS)) & (2**DROPPED_BITS - 1)
    return highest.to(torch.int32)
