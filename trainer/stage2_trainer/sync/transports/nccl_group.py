"""An NCCL group of the learner and one server's workers, with what NCCL lacks: a deadline on every wait, and an end.

The id of the group, which is all that a stranger would need to enter it, travels over the links on which each worker
has proved the job's token. The links stay open: the end of one is the end of the group, so a process that dies is
noticed at once, by either side. Nothing of NCCL runs in the caller's thread: none of its calls can be interrupted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stage2_trainer.sync.transports.link import Link
from stage2_trainer.wire.background import in_background
from stage2_trainer.wire.errors import LinkError

logger = logging.getLogger(__name__)

UNIQUE_ID_BYTES = 128
CHECK_INTERVAL_S = 0.05
ABORT_TIMEOUT_S = 30.0


class Communicator(Protocol):
    """The calls of NCCL that a group needs; each blocks for as long as the other members let it."""

    def new_unique_id(self) -> bytes:
        """Return the id of a new group; the learner makes it."""
        ...

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Enter the group; returns when all members have. Raises RuntimeError."""
        ...

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        """Send `buffer` from rank 0 to all others; returns when it is sent, or filled. Raises RuntimeError.

        ready: a CUDA event to wait for before; None = nothing to wait for.
        """
        ...

    def abort(self) -> None:
        """End the group, and what is under way in it; any thread may ask for it."""
        ...


class NcclGroup:
    """A member of a group. links: to the members whose end is the end of the group."""

    def __init__(self, communicator: Communicator, links: Sequence[Link], timeout_s: float) -> None:
        self._communicator = communicator
        self._links = links
        self._timeout_s = timeout_s

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Enter the group. Raises LinkError."""
        self._run("the NCCL group was not formed", self._communicator.open, unique_id, rank, world_size)

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        """Send a bucket from the learner, or receive one. Raises LinkError."""
        self._run("a bucket was not taken", self._communicator.broadcast, buffer, ready)

    def close(self) -> bool:
        """Leave the group. Returns whether NCCL let go; where it did not, this process can enter no other."""
        aborting = in_background(self._communicator.abort)
        try:
            aborting.result(timeout=ABORT_TIMEOUT_S)
        except TimeoutError:
            logger.error("NCCL does not end a group that it was asked to leave %g s ago", ABORT_TIMEOUT_S)
            return False
        except RuntimeError as error:
            logger.warning("NCCL on leaving a group: %s", error)
        return True

    def _run(self, what: str, step: Callable[..., None], *arguments: Any) -> None:
        running = in_background(step, *arguments)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return running.result(timeout=CHECK_INTERVAL_S)
            except TimeoutError:
                if any(link.is_lost() for link in self._links):
                    raise LinkError(f"{what}: the other side has left the group") from None
                if time.monotonic() > deadline:
                    raise LinkError(f"{what} within {self._timeout_s:g} s") from None
            except RuntimeError as error:
                raise LinkError(f"{what}: {error}") from error
