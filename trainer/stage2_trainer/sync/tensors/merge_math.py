"""The merge of an adapter into a base weight and its rounding: the same bits on every device, with any threads.

Learner and server both merge, and their results are compared byte for byte. Only sums depend on the order of their
operations, and that order changes with threads, tiles and devices. So every sum here is of whole multiples of one power
of two, few and small enough that float64 holds each partial sum exactly (`exact`); every other step is one operation
that IEEE 754 rounds correctly. Tiles may therefore have any size. The multiples are fine: what they lose is far below
the rounding of the float32 result (tests compare with exact sums).

A merged weight moves by less than half a step of bfloat16 while an adapter is young, so rounding to the nearest value
returns the base: what was learnt is not served. Stochastic rounding goes up or down with probabilities that make the
mean right: over many weights just the update's size is served, with noise.

On a CPU a compiled loop with the same bits merges large weights (`merge_kernel`); torch merges small ones, those on a
GPU, and everything where numba is not installed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stage2_api.vllm import SyncRounding
from stage2_trainer.sync.tensors.exact import GOLDEN, SIGNIFICAND_BITS, mixed, on_grid, power_of_two

logger = logging.getLogger(__name__)

DROPPED_BITS = 16  # of a float32, so that a bfloat16 is left
SAMPLED_ROWS = 16  # one row of so many is measured
EXPECTED_NOISE = 2.0**-20  # of a base weight: a DoRA that has not moved differs from its base by float32 rounding
TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}  # the first stays in a core's cache, the second keeps a GPU busy
KERNEL_TILE = 2**18  # of weights: larger ones leave the cache, in smaller ones Python's part shows
KERNEL_WEIGHTS = 2**18  # a model of smaller weights is merged sooner than a kernel is compiled (4 s)
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of base weights


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


@dataclass(frozen=True)
class Rounding:
    """A rule of rounding: equal names, versions and values give equal bytes, on every device.

    version: seeds stochastic rounding; None = to the nearest.
    """

    version: int | None = None

    def key(self, name: str, dtype: torch.dtype) -> int | None:
        """Return the key of a tensor's noise, a signed 64-bit integer; None where it is rounded to the nearest."""
        if self.version is None or dtype != torch.bfloat16:
            return None
        digest = hashlib.blake2b(f"{self.version}|{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    @torch.no_grad()
    def write(self, name: str, value: Tensor, rounded: Tensor, *, first: int = 0) -> None:
        """Round a tensor, or the piece of one that starts at its element `first`, into the contiguous `rounded`."""
        key = self.key(name, rounded.dtype)
        if key is None or value.dtype != torch.float32:
            rounded.copy_(value)
            return
        source, target = value.contiguous().view(-1), rounded.view(-1)
        step = TILE_ELEMENTS[value.device.type]
        for start in range(0, len(source), step):
            piece = source[start : start + step]
            noise = _noise(first + start, len(piece), key, value.device)
            target[start : start + step] = _up_or_down(piece, noise)


NEAREST = Rounding()


def rounding_for(mode: SyncRounding, version: int) -> Rounding:
    """Return the rule for one version's weights."""
    return Rounding(version) if mode == "stochastic" else NEAREST


class KeptUpdate:
    """The share of an update that survives the rounding to the served dtype.

    With W0 the base weight, W the merged one in float32 and W' the served one, it is <W' - W0, W - W0> / ||W - W0||^2:
    the length of the served update along the trained one. 1 = all of it, 0 = servers answer with the base. Every 16th
    row of each merged weight counts.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, base: Tensor, merged: Tensor, served: Tensor) -> None:
        """Add the sampled rows of one weight: as the base has them, merged, and as served."""
        start = base.float().flatten()
        update, survived = (end.flatten() - start for end in (merged, served))
        self._sums.append(torch.stack([survived.dot(update), update.dot(update), start.dot(start)]))

    def share(self) -> float:
        """Return the share over all weights; 1 where nothing has moved."""
        if not self._sums:
            return 1.0
        along, trained, base = torch.stack([sums.cpu().double() for sums in self._sums]).sum(0).tolist()
        return 1.0 if trained <= EXPECTED_NOISE**2 * base else along / trained


@torch.no_grad()
def served_weight(
    name: str, base: Tensor, change: Change, rounding: Rounding, kept: KeptUpdate | None = None
) -> Tensor:
    """Return the merged weight as it is served, in the base's dtype. kept: measures what rounding leaves of it."""
    served = _empty_like(base)
    every = SAMPLED_ROWS if kept is not None else 0
    merged = _merge_in_one_pass(base, change, served, every=every, key=rounding.key(name, base.dtype))
    if merged is None:
        sampled = []
        for rows, tile in merged_tiles(base, change):
            rounding.write(name, tile, served[rows], first=rows.start * base.shape[1])
            if kept is not None:
                sampled.append(tile[-rows.start % SAMPLED_ROWS :: SAMPLED_ROWS].clone())
        merged = torch.cat(sampled) if sampled else None
    if kept is not None and merged is not None:
        kept.add(base[::SAMPLED_ROWS], merged, served[::SAMPLED_ROWS])
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
    elif (kernel := _kernel_for(base)) is not None:
        yield from _by_kernel(base, change, kernel)
    else:
        yield from _by_torch(base, change)


def _by_torch(base: Tensor, adapter: Adapter) -> Iterator[tuple[slice, Tensor]]:
    up, down = _factors(adapter)
    rows = _tile_rows(base, TILE_ELEMENTS[base.device.type])
    for start in range(0, len(base), rows):
        tile = slice(start, start + rows)
        direction = (up[tile] @ down).add_(0.0).add_(base[tile].double())  # the sign of a sum of zeros is a device's
        if adapter.magnitude is not None:
            direction.mul_((adapter.magnitude[tile].double() / _row_norms(direction)).unsqueeze(1))
        yield tile, direction.float()


def _by_kernel(base: Tensor, adapter: Adapter, kernel: ModuleType) -> Iterator[tuple[slice, Tensor]]:
    merge = kernel.MergeKernel(*_factors_for(kernel, adapter)).merge
    rows = torch.get_num_threads() * _tile_rows(base, KERNEL_TILE)
    merged = torch.empty(min(rows, len(base)), base.shape[1], dtype=torch.float32, device="cpu")
    for start in range(0, len(base), rows):
        tile = slice(start, min(start + rows, len(base)))
        piece = merged[: tile.stop - start]
        _merge_rows(merge, start, base[tile].detach().float().contiguous().numpy(), piece.numpy())
        yield tile, piece


def _merge_in_one_pass(
    base: Tensor, change: Change, served: Tensor, *, every: int, key: int | None = None
) -> Tensor | None:
    """Merge and round to the base's dtype in one pass, where the compiled loop can.

    served: receives the result, shape and dtype of `base`, contiguous. every: of so many rows the first is returned in
    float32 too, shape (out / every, in); 0 = none. key: of the noise of stochastic rounding to bfloat16; None = to the
    nearest. Returns None, and does nothing, where the loop cannot: rounding `merged_tiles` gives the same.
    """
    kernel = _kernel_for(base) if isinstance(change, Adapter) and base.is_contiguous() else None
    if kernel is None or not isinstance(change, Adapter) or base.dtype == torch.float16:
        return None
    numbers, (up, down, magnitude) = _numbers(base), _factors_for(kernel, change)
    _merge_rows(kernel.MergeKernel(up, down, magnitude, key).merge, 0, numbers, _numbers(served))
    if not every:
        return torch.empty(0, base.shape[1], device="cpu")
    some = np.ascontiguousarray(numbers[::every])
    sampled = np.empty(some.shape, np.float32)
    kernel.MergeKernel(up[::every], down, None if magnitude is None else magnitude[::every]).merge(0, some, sampled)
    return torch.from_numpy(sampled)


def _kernel_for(base: Tensor) -> ModuleType | None:
    """Return the compiled loop where it exists and pays."""
    fits = base.device.type == "cpu" and base.dtype in KERNEL_DTYPES and base.shape[1] > 1
    return _kernel() if fits and base.numel() >= KERNEL_WEIGHTS else None


@lru_cache(maxsize=1)
def _kernel() -> ModuleType | None:
    try:
        from stage2_trainer.sync.tensors import merge_kernel
    except ImportError as error:  # numba is not there, or not for this numpy
        logger.info("merging on the CPU takes up to twice as long without numba: %s", error)
        return None
    return merge_kernel


def _merge_rows(merge: Callable[..., None], start: int, base: Any, merged: Any) -> None:
    """Merge rows by as many threads as torch has."""
    threads = torch.get_num_threads()
    part = _even(-(-len(base) // threads))
    parts = [slice(at, at + part) for at in range(0, len(base), part)]
    if len(parts) == 1:
        merge(start, base, merged)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(merge, *zip(*((start + p.start, base[p], merged[p]) for p in parts), strict=True)))


def _factors(adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return s B and A in float64, their product unchanged, such that every sum in it is exact.

    What a rank has large in A and small in B is moved to A first, or the common step of a row of B would be too coarse.
    """
    bits = _bits_of_factors(adapter)
    up, down = adapter.up.double() * adapter.scaling, adapter.down.double()
    size = power_of_two(up, dim=0)
    return on_grid(up / size, bits, dim=1), on_grid(down * size.T, bits, dim=0)


def _factors_for(kernel: ModuleType, adapter: Adapter) -> tuple[Any, Any, Any]:
    """Return s B, A and m as the compiled loop reads them: `_factors`, by a loop of its own."""
    up = np.ascontiguousarray((adapter.up.detach().double() * adapter.scaling).numpy())
    down = np.array(adapter.down.detach().double().numpy(), order="C")
    kernel.put_on_grid(up, down, _bits_of_factors(adapter))
    return up, down, None if adapter.magnitude is None else adapter.magnitude.detach().double().numpy()


def _bits_of_factors(adapter: Adapter) -> int:
    """Return the bits of each factor with which sums over the rank are exact."""
    return (SIGNIFICAND_BITS - adapter.down.shape[0].bit_length()) // 2


def _row_norms(matrix: Tensor) -> Tensor:
    bits = SIGNIFICAND_BITS - matrix.shape[1].bit_length()
    return _root(on_grid(matrix.square(), bits, dim=1).sum(1))


def _root(values: Tensor) -> Tensor:
    """Return square roots, rounded correctly: torch's own are MKL's on a CPU, one in a hundred off by its last bit."""
    return torch.from_numpy(np.sqrt(values.numpy())) if values.device.type == "cpu" else values.sqrt()


def _numbers(weights: Tensor) -> Any:
    """Return a weight as the compiled loop reads it, without a copy: float32, or the bits of bfloat16."""
    weights = weights.detach()
    return (weights.view(torch.uint16) if weights.dtype == torch.bfloat16 else weights).numpy()


def _tile_rows(base: Tensor, elements: int) -> int:
    """Return the rows of a tile, an even number."""
    return _even(max(1, elements // base.shape[1] - 1))


def _even(count: int) -> int:
    return count + count % 2


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
