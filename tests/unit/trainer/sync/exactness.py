"""What tests of exact arithmetic share: layers to merge, their merge in float32, rounded tensors and digests."""

import torch

from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge_math import Adapter, merged_tiles, write_rounded


@torch.no_grad()
def merged_weight(base, change):
    """The merged weight in float32."""
    return torch.cat([tile.clone() for _, tile in merged_tiles(base, change)])


def rounded(rounding, name, value, dtype):
    """A tensor as a rule rounds it."""
    found = torch.empty(value.shape, dtype=dtype)
    write_rounded(rounding, name, value, found)
    return found


def digests_of(tensors):
    """The digest of each named tensor."""
    digests = Digests()
    for name, tensor in tensors:
        digests.add(name, tensor)
    return digests.by_tensor()


def layer(shape, rank, dtype=torch.float32, *, dora, seed=0):
    """A base weight and an adapter of it, whose ranks are of very different sizes: sums of them show their order."""
    generator = torch.Generator().manual_seed(seed)
    out, width = shape
    base = (torch.randn(shape, generator=generator) * 0.03).to(dtype)
    spread = torch.logspace(-3, 3, rank)
    up = torch.randn(out, rank, generator=generator) * spread * 1e-2
    down = torch.randn(rank, width, generator=generator) * width**-0.5 / spread.unsqueeze(1)
    return base, Adapter(up, down, 2.0, torch.rand(out, generator=generator) + 0.5 if dora else None)
