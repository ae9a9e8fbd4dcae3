"""Merging an adapter into a bfloat16 weight on one core, cast once, as served: the compiled loop against torch.

torch twice: by the operations that give the same bits on every device, and by a plain float32 merge, whose bits depend
on the order of its sums.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest.mock import patch

import torch
from bench.tables import Row, Table, seconds
from torch import Tensor

from stage2_trainer.sync.tensors import merge_math
from stage2_trainer.sync.tensors.merge_math import NEAREST, Adapter, Rounding, served_weight

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
            for peer, call in (("the same bits by torch", by_torch), ("plain float32 by torch", plain)):
                theirs = seconds(lambda: call(base, adapter))  # noqa: B023
                share = (call(base, adapter) != found).double().mean()
                yield Row(what, peer, ours / base.numel(), theirs / base.numel(), f"{share:.3%} of weights differ")


def layer(shape: tuple[int, int], rank: int, *, dora: bool) -> tuple[Tensor, Adapter]:
    """Return a base weight and an adapter that moves it a little."""
    torch.manual_seed(0)
    base = (torch.randn(shape) * 0.03).bfloat16()
    up, down = torch.randn(shape[0], rank) * 1e-3, torch.randn(rank, shape[1]) * 0.05
    return base, Adapter(up, down, SCALING, base.float().norm(dim=1) if dora else None)


def served(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as a sync does."""
    return served_weight("weight", base, adapter, NEAREST)


def by_torch(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as a sync does where there is no compiled loop."""
    with patch.object(merge_math, "KERNEL_WEIGHTS", sys.maxsize):
        return served(base, adapter)


def plain(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as PEFT and others do."""
    direction = base.float() + (adapter.up @ adapter.down) * adapter.scaling
    if adapter.magnitude is not None:
        direction *= (adapter.magnitude / direction.norm(dim=1)).unsqueeze(1)
    return direction.to(base.dtype)


@torch.no_grad()
def rounding_rows() -> Iterator[Row]:
    """Merging and rounding up or down in one pass, against the nearest, and against a pass of torch for the noise."""
    for shape in SHAPES[1:]:
        for dora in (False, True):
            base, adapter = layer(shape, 16, dora=dora)
            found, ours = stochastic(base, adapter), seconds(lambda: stochastic(base, adapter))  # noqa: B023
            what = f"{'DoRA' if dora else 'LoRA'} of rank 16, {shape[0]} x {shape[1]}"
            for peer, call in (("rounded to the nearest", served), ("noise by torch, a tile at a time", in_tiles)):
                theirs = seconds(lambda: call(base, adapter))  # noqa: B023
                share = (call(base, adapter) != found).double().mean()
                yield Row(what, peer, ours / base.numel(), theirs / base.numel(), f"{share:.3%} of weights differ")


def stochastic(base: Tensor, adapter: Adapter) -> Tensor:
    """Merge as a sync does with `vllm.sync.rounding: stochastic`."""
    return served_weight("weight", base, adapter, Rounding(7))


def in_tiles(base: Tensor, adapter: Adapter) -> Tensor:
    """The same where each tile is merged by the compiled loop, and torch adds the noise."""
    with patch.object(merge_math, "_merge_in_one_pass", lambda *_, **__: None):
        return stochastic(base, adapter)


TABLE = Table("Merging an adapter", "ns/weight", 1e9, rows)
ROUNDING = Table("Merging, and rounding up or down (`vllm.sync.rounding: stochastic`)", "ns/weight", 1e9, rounding_rows)
