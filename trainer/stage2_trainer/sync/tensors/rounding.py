"""The rounding of merged weights to the dtype that servers hold, and the share of an update that survives it.

A merged weight W moves by less than half a step of bfloat16 while an adapter is young, and then rounding to the nearest
value gives the base back: what was learnt is not served. Stochastic rounding goes up or down with probabilities that
make the mean right, so of many weights together just the update's size is served, with noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stage2_api.vllm import SyncRounding
from stage2_trainer.sync.tensors.merge_math import Change, merge_and_round, merged_tiles
from stage2_trainer.sync.tensors.splitmix import GOLDEN, mixed

DROPPED_BITS = 16  # of a float32, so that a bfloat16 is left
TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
SAMPLED_ROWS = 16  # of so many rows one is looked at
EXPECTED_NOISE = 2.0**-20  # of a base weight: a DoRA that has not moved differs from its base by float32 rounding


@dataclass(frozen=True)
class Rounding:
    """A rule of rounding. version: with it begins the random sequence of stochastic rounding; None = to the nearest."""

    version: int | None = None

    def apply(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in `dtype`. Equal names, versions and values give equal bytes, on every device."""
        rounded = torch.empty_like(value, dtype=dtype, memory_format=torch.contiguous_format)
        self.write(name, value, rounded)
        return rounded

    def key(self, name: str, dtype: torch.dtype) -> int | None:
        """Return the key of a tensor's noise, of 64 bits with a sign; None where it is rounded to the nearest."""
        if self.version is None or dtype != torch.bfloat16:
            return None
        digest = hashlib.blake2b(f"{self.version}|{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    @torch.no_grad()
    def write(self, name: str, value: Tensor, rounded: Tensor, *, first: int = 0) -> None:
        """Round a tensor, or the piece of one that begins with its element number `first`, into a contiguous one."""
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


def rounding_of(mode: SyncRounding, version: int) -> Rounding:
    """Return the rule of one version's weights."""
    return Rounding(version) if mode == "stochastic" else NEAREST


class KeptUpdate:
    """The share of an update that survives the rounding to the served dtype.

    With W0 the base weight, W the merged one in float32 and W' what is served, it is <W' - W0, W - W0> / ||W - W0||^2:
    the length of the served update along the trained one. 1 = all of it, 0 = servers answer with the base. It says how
    much of what was learnt since the start of training makes the rollouts. Every 16th row of each merged weight counts.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def add(self, base: Tensor, merged: Tensor, served: Tensor) -> None:
        """Take the sampled rows of one weight, of each of the three."""
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
    """Return the merged weight as it is served, in the base's dtype. kept: learns what its rounding leaves of it."""
    served = _empty_like(base)
    every, key = SAMPLED_ROWS if kept is not None else 0, rounding.key(name, base.dtype)
    merged = merge_and_round(base, change, served, every=every, key=key)
    if merged is not None:
        if kept is not None:
            kept.add(base[::SAMPLED_ROWS], merged, served[::SAMPLED_ROWS])
        return served
    sampled = []
    for rows, tile in merged_tiles(base, change):
        rounding.write(name, tile, served[rows], first=rows.start * base.shape[1])
        if kept is not None:
            sampled.append(tile[-rows.start % SAMPLED_ROWS :: SAMPLED_ROWS].clone())
    if kept is not None:
        kept.add(base[::SAMPLED_ROWS], torch.cat(sampled), served[::SAMPLED_ROWS])
    return served


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same shape, dtype and device.

    numpy asks for huge pages: the first touch of small ones takes as long as the merge of what they hold.
    """
    if tensor.device.type != "cpu":
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape)


def _up_or_down(piece: Tensor, noise: Tensor) -> Tensor:
    """Add noise below the last bit that is kept, and drop what is below it; what is not finite stays."""
    kept = (piece.view(torch.int32) + noise) & (-1 << DROPPED_BITS)
    return torch.where(piece.isfinite(), kept.view(torch.float32), piece).to(torch.bfloat16)


def _noise(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return numbers of 16 bits for these places of a sequence."""
    words = torch.arange(start, start + count, device=device).mul_(GOLDEN).add_(key)
    highest: Tensor = (mixed(mixed(words)) >> (64 - DROPPED_BITS)) & (2**DROPPED_BITS - 1)
    return highest.to(torch.int32)
