"""NCCL groups, with what NCCL lacks: a deadline for every wait, and an abort.

The id of a group is all that a stranger would need to enter it, so it travels over the links on which each worker has
proved the job's token. The links stay open: the end of one is the end of the group, so either side notices at once when
a process dies. No NCCL call runs in the caller's thread, because none can be interrupted.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import torch

from stage2_trainer.process.background import in_background
from stage2_trainer.sync.transports.link import LEARNER_RANK, Link, abort_all
from stage2_trainer.sync.transports.nccl_choice import log_links
from stage2_trainer.sync.transports.transfer import Packed
from stage2_trainer.wire.errors import LinkError

logger = logging.getLogger(__name__)

UNIQUE_ID_BYTES = 128
CHECK_INTERVAL_S = 0.05
ABORT_TIMEOUT_S = 30.0
GROUP_ENDED = "the group of all servers was left"


class NcclCommunicator:
    """NCCL on this process's GPU, with a CUDA stream of its own, by vLLM's wrapper of the library.

    Each call blocks for as long as the other members let it. The wrapper is imported here: it loads only where NCCL
    runs.
    """

    def __init__(self, device: torch.device) -> None:
        from vllm.distributed.device_communicators import pynccl_wrapper

        self._nccl: Any = pynccl_wrapper
        self._library: Any = pynccl_wrapper.NCCLLibrary()
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._rank = LEARNER_RANK
        self._communicator: Any = None
        self._aborted = False

    def new_unique_id(self) -> bytes:
        """Return the id of a new group; the learner creates it."""
        unique_id = self._library.ncclGetUniqueId()
        return ctypes.string_at(ctypes.addressof(unique_id), UNIQUE_ID_BYTES)

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Enter the group; returns when all members have. Raises RuntimeError."""
        with torch.cuda.device(self._device):
            self._rank = rank
            shared = self._library.unique_id_from_bytes(unique_id)
            self._communicator = self._library.ncclCommInitRank(world_size, shared, rank)
            if self._aborted:  # while the group was formed; NCCL names it only now
                self.abort()

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        """Send `buffer` from rank 0 to all others; returns when it is sent, or filled. Raises RuntimeError.

        ready: a CUDA event to wait for before; None = nothing to wait for.
        """
        if self._communicator is None:
            raise RuntimeError("the group was left")
        with torch.cuda.device(self._device):
            if ready is not None:
                self._stream.wait_event(ready)
            data = self._nccl.buffer_type(buffer.data_ptr())
            self._library.ncclBroadcast(
                data if self._rank == LEARNER_RANK else self._nccl.buffer_type(),
                data,
                buffer.numel(),
                self._nccl.ncclDataTypeEnum.from_torch(buffer.dtype),
                LEARNER_RANK,
                self._communicator,
                self._nccl.cudaStream_t(self._stream.cuda_stream),
            )
            self._stream.synchronize()

    def abort(self) -> None:
        """End the group and its calls under way; any thread may call it."""
        self._aborted = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with torch.cuda.device(self._device):
                self._library.ncclCommAbort(communicator)


class NcclGroup:
    """A member of a group. links: to the members whose end is the end of the group."""

    def __init__(self, communicator: NcclCommunicator, links: Sequence[Link], timeout_s: float) -> None:
        self._communicator = communicator
        self._links = links
        self._timeout_s = timeout_s
        self._named_links = False

    @classmethod
    def create(cls, communicator: NcclCommunicator, links: Sequence[Link], timeout_s: float) -> Self:
        """Return a new group of the learner and the workers at the other ends of `links`, once all have entered it.

        Raises:
            LinkError: it was not formed.
        """
        group = cls(communicator, links, timeout_s)
        try:
            unique_id = communicator.new_unique_id()
            for link in links:
                link.send([unique_id], timeout_s)
            group.open(unique_id, LEARNER_RANK, 1 + len(links))
        except BaseException:
            abort_all(links)
            group.close()
            raise
        return group

    def open(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Enter the group. Raises LinkError."""
        self._run("the NCCL group was not formed", self._communicator.open, unique_id, rank, world_size)

    def broadcast(self, buffer: torch.Tensor, ready: Any) -> None:
        """Send a bucket from the learner, or receive one. Raises LinkError."""
        self._run("a bucket was not received", self._communicator.broadcast, buffer, ready)
        if not self._named_links:
            self._named_links = True
            log_links()

    def close(self) -> bool:
        """Leave the group. Returns whether NCCL released it; if not, this process can enter no other group."""
        aborting = in_background(self._communicator.abort)
        try:
            aborting.result(timeout=ABORT_TIMEOUT_S)
        except TimeoutError:
            logger.error("NCCL has not left a group %g s after the request", ABORT_TIMEOUT_S)
            return False
        except RuntimeError as error:
            logger.warning("NCCL reported an error while leaving a group: %s", error)
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


class OneGroup:
    """One group of the learner and the workers of all its servers: each bucket leaves the learner once.

    Each server has a seat, by number, and a thread of the learner that calls for it; it keeps its own port, links and
    HTTP calls. Only NCCL's communicator is shared, and ranks continue from one server to the next. All servers must get
    the same bytes, so it is for full training. The first break ends the group for good: a server that stands still
    costs the others one deadline, and from then on each server has a group of its own.

    communicator: creates NCCL's side. timeout_s: seconds that forming the group, or sending a bucket, may take.
    """

    def __init__(self, servers: int, *, communicator: Callable[[], NcclCommunicator], timeout_s: float) -> None:
        self._servers = servers
        self._communicator = communicator
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._workers: dict[int, int] = {}
        self._links: dict[int, Sequence[Link]] = {}
        self._group: NcclGroup | None = None
        self._sending: weakref.WeakKeyDictionary[Packed, Future[None]] = weakref.WeakKeyDictionary()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether each server is on its own."""
        return self._ended

    def ranks(self, seat: int, workers: int) -> tuple[int, int]:
        """Return the rank of a server's first worker, and the number of members; waits for the other servers.

        Raises:
            LinkError: one of them did not come in time, or the group has ended.
        """
        with self._changed:
            self._workers[seat] = workers
            self._changed.notify_all()
            self._wait_until(lambda: len(self._workers) == self._servers)
            before = sum(count for other, count in self._workers.items() if other < seat)
            return LEARNER_RANK + 1 + before, 1 + sum(self._workers.values())

    def enter(self, seat: int, links: Sequence[Link]) -> None:
        """Form the group once the links to the workers of all servers are there; returns when it is formed.

        Raises:
            LinkError: it was not formed.
        """
        with self._changed:
            self._links[seat] = links
            is_last = len(self._links) == self._servers and not self._ended
        if is_last:
            self._form()
        with self._changed:
            self._wait_until(lambda: self._group is not None)

    def send(self, packed: Packed) -> bool:
        """Send a bucket to all servers once. Each server's thread calls, and waits; returns True to one of them.

        Raises:
            LinkError: not all received it, and the group cannot be used any more.
        """
        with self._changed:
            group = self._group
            if self._ended or group is None:
                raise LinkError(GROUP_ENDED)
            is_first = packed not in self._sending
            done = self._sending.setdefault(packed, Future())
        if is_first:
            _broadcast(group, packed, done)
        done.result()
        return is_first

    def end(self) -> None:
        """End the group: all waits in it fail, here and at the servers."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            links = [link for of_server in self._links.values() for link in of_server]
            group, self._group = self._group, None
            self._changed.notify_all()
        abort_all(links)
        if group is not None:
            group.close()

    def _form(self) -> None:
        links = [link for _, of_server in sorted(self._links.items()) for link in of_server]
        try:
            group = NcclGroup.create(self._communicator(), links, self._timeout_s)
        except BaseException:
            self.end()
            raise
        with self._changed:
            if not self._ended:
                self._group = group
                self._changed.notify_all()
                return
        group.close()  # another server's thread has waited too long meanwhile
        raise LinkError(GROUP_ENDED)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._ended or holds(), self._timeout_s)
        if self._ended or not holds():
            raise LinkError(GROUP_ENDED if self._ended else f"not all servers came within {self._timeout_s:g} s")


def _broadcast(group: NcclGroup, packed: Packed, done: Future[None]) -> None:
    try:
        for part in packed.parts:
            group.broadcast(part, packed.ready)
    except Exception as error:  # noqa: BLE001  # it is raised to each server's thread
        done.set_exception(error)
    else:
        done.set_result(None)
