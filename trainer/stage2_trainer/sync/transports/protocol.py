"""The interface of a transfer of weights to one server, over any transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stage2_api.vllm import Transport
from stage2_trainer.wire.client import ServerClient

INIT_ROUTE = "/init_weight_transfer_engine"
INIT_PHASE = "connect"


@dataclass(frozen=True)
class Packed:
    """A bucket to be sent.

    parts: its bytes, in order: uint8, flat. ready: the CUDA event after which they are there; None = they are.
    """

    parts: Sequence[torch.Tensor]
    ready: Any = None


class WeightTransfer(Protocol):
    """A transfer of weights to one server.

    transport: the name of what carries it. staging: where its buckets must lie.
    """

    transport: Transport
    staging: torch.device

    @property
    def group(self) -> str:
        """The name of the group that was formed last; empty before."""
        ...

    @property
    def sent(self) -> int:
        """Bytes that went to this server's workers so far, in all groups, as they were counted on their way out."""
        ...

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways between members that the transport chose by itself; empty where it chooses none, or says none."""
        ...

    def connect(self, client: ServerClient) -> None:
        """Form the group with the server's workers. Raises ServerError."""
        ...

    def send(self, packed: Packed) -> None:
        """Send a bucket to every worker; it must stay unchanged until this returns.

        Raises:
            LinkError: it was not taken in time, or the group broke.
        """
        ...

    def aborter(self) -> Callable[[], None]:
        """Return a call that ends this group, here and on the server, and no later one; any thread may make it."""
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
