"""Gradients of rows that are trained on before the step's counts are known: of either sum of the loss on its own.

Those of ordinary tokens lie where gradients lie anyway; those of coordinates need as much memory once more. So rows
train early only where that is little, as with adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

logger = logging.getLogger(__name__)

SHARE = 1 / 20  # of the device's memory, which gradients of coordinates may take at most
_MIB = 2**20


class EarlyGradients:
    """Gradients of two sums, apart from one another until `apply` divides and joins them."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._coords: list[torch.Tensor | None] = [None] * len(parameters)

    @property
    def coords(self) -> list[torch.Tensor]:
        """The gradients of coordinates so far; those of ordinary tokens are with the parameters."""
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
    """Return where early gradients go on a device of so much memory; None where they would take too much of it."""
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
