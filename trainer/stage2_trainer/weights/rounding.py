"""The rounding of merged weights to the dtype that servers hold, and the share of an update that survives it.

A merged weight W moves by less than half a step of bfloat16 while an adapter is young, and then rounding to the nearest
value gives the base back: what was learnt is not served. Stochastic rounding goes up or down with probabilities that
make the mean right, so of many weights together just the update's size is served, with noise.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from stage2_api.vllm import SyncRounding
from stage2_trainer.weights.splitmix import GOLDEN, mixed

DROPPED_BITS = 16  # of a float32, so that a bfloat16 is left
TILE_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
SAMPLED_ROWS = 16  # of so many rows one is looked at
EXPECTED_NOISE = 2.0**-20  # of a base weight: a DoRA that has not moved differs from its base by float32 rounding


@dataclass(frozen=True)
class Rounding:
    """A rule of rounding. version: with it begins the random sequence of stochastic rounding; None = to the nearest."""

    version: int | None = None

    @torch.no_grad()
    def apply(self, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor in `dtype`. Equal names, versions and values give equal bytes, on every device."""
        if self.version is None or value.dtype != torch.float32 or dtype != torch.bfloat16:
            return value.to(dtype)
        key = hashlib.blake2b(f"{self.version}|{name}".encode(), digest_size=8).digest()
        rounded = torch.empty(value.shape, dtype=dtype, device=value.device)
        source, target = value.contiguous().view(-1), rounded.view(-1)
        step = TILE_ELEMENTS[value.device.type]
        for start in range(0, len(source), step):
            piece = source[start : start + step]
            noise = _noise(start, len(piece), int.from_bytes(key, "big", signed=True), value.device)
            target[start : start + step] = _up_or_down(piece, noise)
        return rounded


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
        """Take one weight; the three have one shape."""
        start, *ends = (tensor[::SAMPLED_ROWS].double() for tensor in (base, merged, served))
        update, survived = (end - start for end in ends)
        sums = [(survived * update).sum(), update.square().sum(), start.square().sum()]
        self._sums.append(torch.stack(sums))

    def share(self) -> float:
        """Return the share over all weights; 1 where nothing has moved."""
        if not self._sums:
            return 1.0
        along, trained, base = torch.stack([sums.cpu() for sums in self._sums]).sum(0).tolist()
        return 1.0 if trained <= EXPECTED_NOISE**2 * base else along / trained


def _up_or_down(piece: Tensor, noise: Tensor) -> Tensor:
    """Add noise below the last bit that is kept, and drop what is below it; what is not finite stays."""
    kept = (piece.view(torch.int32) + noise) & (-1 << DROPPED_BITS)
    return torch.where(piece.isfinite(), kept.view(torch.float32), piece).to(torch.bfloat16)


def _noise(start: int, count: int, key: int, device: torch.device) -> Tensor:
    """Return numbers of 16 bits for these places of a sequence."""
    words = torch.arange(start, start + count, device=device).mul_(GOLDEN).add_(key)
    highest: Tensor = (mixed(mixed(words)) >> (64 - DROPPED_BITS)) & (2**DROPPED_BITS - 1)
    return highest.to(torch.int32)
