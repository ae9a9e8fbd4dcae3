"""Room for rollouts: training state waits in main memory while an engine on the same GPU generates.

The optimizer's state leaves first and returns last, so that weights are pushed to the engine while the model is still
where it trains (semantics, section 10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Mover(Protocol):
    """A mover of tensors' bytes to another place and back; the tensor itself stays the object that it was."""

    def away(self, tensor: Tensor) -> None:
        """Put the bytes where they do not take up the device's memory."""
        ...

    def back(self, tensor: Tensor) -> None:
        """Put the same bytes back."""
        ...

    def release(self) -> None:
        """Give freed memory back to the device, so that an engine beside the trainer finds it."""
        ...


class DeviceMover:
    """A mover between a device and main memory. On the CPU both are the same, and nothing moves.

    A GPU copies from and to page-locked memory by itself, at the speed of its bus, and nothing waits for one tensor
    after the other. PyTorch keeps such memory, rounded up to powers of two, for the next time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"

    def away(self, tensor: Tensor) -> None:
        """Put the bytes into main memory; on a GPU they are there after `release`. What is there already stays."""
        if self._device.type != "cpu" and tensor.device.type != "cpu":
            tensor.data = host_copy(tensor.data, page_locked=self._on_gpu)

    def back(self, tensor: Tensor) -> None:
        """Put the bytes on the device."""
        tensor.data = tensor.data.to(self._device, non_blocking=True)

    def release(self) -> None:
        """Wait for what moves, and empty the allocator's cache."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()


def host_copy(tensor: Tensor, *, page_locked: bool) -> Tensor:
    """Return a tensor's bytes in main memory, laid out as it is. From a GPU they are there once it has copied them."""
    held = torch.empty_like(tensor, device="cpu", pin_memory=page_locked)
    return held.copy_(tensor, non_blocking=True)


class StateOffloader:
    """The parts of the training state that make room (`offload_model`, `offload_optimizer`)."""

    def __init__(self, mover: Mover, *, model: bool, optimizer: bool) -> None:
        self._mover = mover
        self._model = model
        self._optimizer = optimizer
        self.find_optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None

    def without_optimizer(self) -> AbstractContextManager[None]:
        """Return a context in which the optimizer's state is away, if it is to make room."""
        if not self._optimizer:
            return nullcontext()
        return moved_away(optimizer_tensors(self.find_optimizer()), self._mover)

    def without_model(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters are away, if they are to make room."""
        return moved_away(model.parameters(), self._mover) if self._model else nullcontext()


@contextmanager
def moved_away(tensors: Iterable[Tensor], mover: Mover) -> Iterator[None]:
    """Keep the tensors away for the time of the block; each comes back, also when the block or another move fails."""
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

    Scalars (step counts) stay: some optimizers keep them on the CPU on purpose. Optimizers of 8 bits share tensors
    between parameters, which must not be copied again while the first copy is on its way.
    """
    states: Iterable[dict[str, Any]] = optimizer.state.values() if optimizer is not None else ()
    values = (value for state in states for value in state.values())
    return list({id(value): value for value in values if isinstance(value, Tensor) and value.dim() > 0}.values())
