"""The interface of a transfer of weights to one server, over any transport."""

from __future__ import annotations

from typing import Protocol

import torch

from stage2_trainer.wire.client import ServerClient

INIT_ROUTE = "/init_weight_transfer_engine"
INIT_PHASE = "connect"


class PendingBroadcast(Protocol):
    """A broadcast under way."""

    def done(self) -> bool:
        """Whether it has ended. Raises RuntimeError if it has failed."""
        ...


class WeightTransfer(Protocol):
    """A transfer of weights to one server."""

    def connect(self, client: ServerClient) -> None:
        """Form the group with the server's workers. Raises ServerError."""
        ...

    def broadcast(self, buffer: torch.Tensor) -> PendingBroadcast:
        """Start sending `buffer` (uint8, shape (bytes,)) to every worker; it must stay unchanged until done."""
        ...

    def disconnect(self) -> None:
        """Leave the group. What is under way in it fails, here and on the server."""
        ...

    def close(self) -> None:
        """Leave the group and give the port back."""
        ...


class SwiftGroup(Protocol):
    """The transfer group of one server's workers and the learner."""

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Broadcast from the learner, and wait for all. Raises RuntimeError."""
        ...
