"""Merging an adapter into a bfloat16 weight on one core, cast once, as served.

The peer is a plain float32 merge, whose bits depend on the order of its sums.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench.tables import Row, Table, seconds
from torch import Tensor

from stage2_trainer.sync.tensors.merge_math import Adapter, served_weight

SHAPES = ((512, 512), (1024, 3072), (4096, 4096), (12288, 4096))
RANKS = (8, 16, 64)
SCALING = 2.0


@torch.no_grad()
def rows() -> Iterator[Row]:
    """Shapes of small and large models' layers at one rank, then one of them at others."""
    for shape, rank in [*((shape, 16) for shape in SHAPES), *((SHAPES[2], rank) for rank in RANKS if rank != 16)]:
        for dora in (False, True):
            base, adapter = layer(shape, rank, dora=dora)
            found, ours = served(base, adapter), seconds(lambda: served(base, adapter))  # noqa: B023
            what = f"{'DoRA' if dora else 'LoRA'} of rank {rank}, {shape[0]} x {shape[1]}"
            theirs = seconds(lambda: plain(base, adapter))  # noqa: B023
            share = (plain(base, adapter) != found).double().mean()
            yield Row(
                what, "plain float32", ours / base.numel(), theirs / base.numel(), f"{share:.3%} of weights differ"
            )


def layer(shape: tuple[int, int], rank: int, *, dora: bool) -> tuple[Tensor, Adapter]:
    """Return a base weight and an adapter that moves it a little."""
    torch.manual_seed(0)
    base = (torch.randn(shape) * 0.03).bfloat16()
    up, down = torch.randn(shape[0], rank) * 1e-3, torch.randn(rank, shape[1]) * 0.05
    return base, Adapter(up, down, SCALING, base.float().norm(dim=1) if dora else None)


def served(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as a sync does."""
    return served_weight("weight", base, adapter, None)


def plain(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as PEFT and others do."""
    direction = base.float() + (adapter.up @ adapter.down) * adapter.scaling
    if adapter.magnitude is not None:
        direction *= (adapter.magnitude / direction.norm(dim=1)).unsqueeze(1)
    return direction.to(base.dtype)


@torch.no_grad()
def rounding_rows() -> Iterator[Row]:
    """Merging and rounding up or down, against the nearest."""
    for shape in SHAPES[1:]:
        for dora in (False, True):
            base, adapter = layer(shape, 16, dora=dora)
            found, ours = stochastic(base, adapter), seconds(lambda: stochastic(base, adapter))  # noqa: B023
            what = f"{'DoRA' if dora else 'LoRA'} of rank 16, {shape[0]} x {shape[1]}"
            theirs = seconds(lambda: served(base, adapter))  # noqa: B023
            share = (served(base, adapter) != found).double().mean()
            peer = "rounded to the nearest"
            yield Row(what, peer, ours / base.numel(), theirs / base.numel(), f"{share:.3%} of weights differ")


def stochastic(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as a sync does with `vllm.sync.rounding: stochastic`."""
    return served_weight("weight", base, adapter, 7)


TABLE = Table("Merging an adapter", "ns/weight", 1e9, rows)
ROUNDING = Table("Merging, and rounding up or down (`vllm.sync.rounding: stochastic`)", "ns/weight", 1e9, rounding_rows)
