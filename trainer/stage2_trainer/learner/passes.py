"""Tools of forward and backward passes: gradients apart from one another, and a computation inside a wrapped model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARE = 1 / 20  # of the device's memory, which gradients of coordinates may take at most
_MIB = 2**20


class EarlyGradients:
    """Gradients of rows that train before the step's counts are known: of either sum of the loss on its own.

    Those of ordinary tokens are with the parameters; those of coordinates need as much memory once more, until `apply`
    divides and joins them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._coords: list[torch.Tensor | None] = [None] * len(parameters)

    @property
    def coords(self) -> list[torch.Tensor]:
        """The gradients of coordinates so far."""
        return [one for one in self._coords if one is not None]

    def add(self, ordinary: torch.Tensor, coords: torch.Tensor) -> None:
        """Run the backward passes of a row's two sums."""
        ordinary.backward(retain_graph=True)
        self._exchange()
        coords.backward()
        self._exchange()

    def apply(self, ce: float, coord: float) -> None:
        """Divide the gradients by the step's counts, and leave their sum with the parameters."""
        for i, parameter in enumerate(self._parameters):
            coords, self._coords[i] = self._coords[i], None
            if parameter.grad is not None:
                parameter.grad.div_(ce)
            if coords is not None:
                part = coords.div_(coord)
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    def _exchange(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad, self._coords[i] = self._coords[i], parameter.grad


def early_gradients(parameters: Sequence[nn.Parameter], memory_bytes: int) -> EarlyGradients | None:
    """Return a place for early gradients on a device of so much memory; None where they would take too much of it."""
    needed, most = sum(one.nbytes for one in parameters), int(SHARE * memory_bytes)
    sizes = needed / _MIB, most / _MIB
    if needed > most:
        logger.warning(
            "rows train when the last answer of a step is there: to train while answers are awaited would take %.0f "
            "MiB more for gradients, and %.0f MiB is the limit, a twentieth of the device's memory; adapters "
            "(tuner.train_type: lora) take less",
            *sizes,
        )
        return None
    logger.info("rows train while answers are awaited: %.0f MiB more for gradients, of at most %.0f MiB", *sizes)
    return EarlyGradients(parameters)


def run_inside(wrapper: nn.Module, module: nn.Module, compute: Callable[..., T], *inputs: Any) -> T:
    """Return `compute(*inputs)`, run as the forward pass of `module` inside `wrapper` (which may be `module`).

    DistributedDataParallel and DeepSpeed gather and reduce around the `forward` of their wrapper: what bypasses it
    trains each process on its own, silently. The loss needs hidden states, not all logits, so for the time of one call
    the wrapped module's `forward` is a function of ours.
    """
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
