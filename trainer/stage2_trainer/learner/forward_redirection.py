"""A computation of our own inside the forward pass of a wrapped model.

DistributedDataParallel and DeepSpeed gather and reduce around `forward` of their wrapper: what bypasses it trains each
process on its own, silently. The loss here needs hidden states, not all logits, so for the time of one call the wrapped
module's `forward` is a function of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def run_inside(wrapper: nn.Module, module: nn.Module, compute: Callable[..., T], *inputs: Any) -> T:
    """Return `compute(*inputs)`, run as the forward pass of `module` inside `wrapper` (which may be `module`)."""
    own = module.__dict__.get("forward")

    def restore() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    def redirected(*arguments: Any) -> T:
        restore()  # compute may call the module's own forward pass
        return compute(*arguments)

    module.forward = redirected
    try:
        found: T = wrapper(*inputs)
    finally:
        restore()
    return found
