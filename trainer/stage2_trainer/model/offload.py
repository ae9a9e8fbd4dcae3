"""Offloading: training state moves to main memory while an engine on the same GPU generates.

The optimizer's state leaves first and returns last, so weights are pushed to the engine while the model is still on the
GPU (semantics, section 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class DeviceMover:
    """Moves tensors between a device and main memory. On the CPU both are the same, and nothing moves.

    A GPU copies from and to page-locked memory at the speed of its bus, without a wait for each tensor. PyTorch keeps
    such memory for the next time, rounded up to powers of two.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"

    def away(self, tensor: Tensor) -> None:
        """Move the bytes to main memory, unless they are there; from a GPU they have arrived after `release`."""
        if self._device.type != "cpu" and tensor.device.type != "cpu":
            tensor.data = host_copy(tensor.data, page_locked=self._on_gpu)

    def back(self, tensor: Tensor) -> None:
        """Move the bytes to the device."""
        tensor.data = tensor.data.to(self._device, non_blocking=True)

    def release(self) -> None:
        """Wait for copies, and return freed memory to the GPU, for the engine beside the trainer."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


def host_copy(tensor: Tensor, *, page_locked: bool) -> Tensor:
    """Return a copy in main memory with the same layout. From a GPU the bytes arrive once it has copied them."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=page_locked)
    return copy.copy_(tensor, non_blocking=True)


class StateOffloader:
    """Moves the configured parts of the training state (`offload_model`, `offload_optimizer`)."""

    def __init__(self, mover: DeviceMover, *, model: bool, optimizer: bool) -> None:
        self._mover = mover
        self._model = model
        self._optimizer = optimizer
        self.find_optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None

    def without_optimizer(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer's state is away, if configured."""
        if not self._optimizer:
            return nullcontext()
        return moved_away(optimizer_tensors(self.find_optimizer()), self._mover)

    def without_model(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters are away, if configured."""
        return moved_away(model.parameters(), self._mover) if self._model else nullcontext()


@contextmanager
def moved_away(tensors: Iterable[Tensor], mover: DeviceMover) -> Iterator[None]:
    """Keep the tensors away during the block; each returns, even if the block or another move fails."""
    try:
        with ExitStack() as returning:
            for tensor in tensors:
                returning.callback(mover.back, tensor)
                mover.away(tensor)
            mover.release()
            yield
    finally:
        mover.release()


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the tensors of an optimizer's state, each once; none before its first step.

    Scalars (step counts) stay: some optimizers keep them on the CPU on purpose. 8-bit optimizers share tensors between
    parameters, which must not be copied again while the first copy is under way.
    """
    states: Iterable[dict[str, Any]] = optimizer.state.values() if optimizer is not None else ()
    values = (value for state in states for value in state.values())
    return list({id(value): value for value in values if isinstance(value, Tensor) and value.dim() > 0}.values())
