"""Both ends of a transfer over TCP: the learner's, and a worker's, at which buckets arrive in main memory."""

from __future__ import annotations

import weakref
from concurrent.futures import Future

import numpy as np
import torch

from stage2_trainer.sync.transports.link import GroupInfo, Link
from stage2_trainer.sync.transports.transfer import Packed, WeightTransfer
from stage2_trainer.wire.background import in_background


class TcpTransfer(WeightTransfer):
    """A transfer over TCP, from main memory.

    Each worker has a link of its own, so one that is slow does not delay the others.
    """

    transport = "tcp"
    staging = torch.device("cpu")

    def send(self, packed: Packed) -> None:
        if packed.ready is not None:
            packed.ready.synchronize()
        parts = [part.numpy().data for part in packed.parts]
        others = [in_background(link.send, parts, self._timeout_s) for link in self._links[1:]]
        self._links[0].send(parts, self._timeout_s)
        for other in others:
            other.result()


def open_tcp(link: Link, info: GroupInfo, _rank: int) -> TcpInlet:
    """Receive over the link itself."""
    return TcpInlet(link, info.timeout_s)


class TcpInlet:
    """A link at which buckets arrive, one after the other. timeout_s: seconds that a bucket may take."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._buffers = Buffers()

    def start(self, nbytes: int) -> Future[torch.Tensor]:
        """Begin to receive the next bucket."""
        return in_background(self._receive, self._buffers.take(nbytes))

    def end_push(self) -> None:
        """Give back what only a push needs."""
        self._buffers.clear()

    def close(self) -> None:
        """End the link."""
        self._link.close()

    def _receive(self, buffer: torch.Tensor) -> torch.Tensor:
        self._link.receive_into(buffer.numpy().data, self._timeout_s)
        return buffer


class Buffers:
    """Memory for buckets, used again once no tensor that was cut from it is alive: fresh memory costs page faults."""

    def __init__(self) -> None:
        self._all: list[_Buffer] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory that nothing else uses, uint8 of shape (nbytes,)."""
        fitting = [buffer for buffer in self._all if buffer.is_free() and buffer.memory.nbytes >= nbytes]
        if not fitting:
            self._all = [buffer for buffer in self._all if not buffer.is_free()]
            fitting = [_Buffer(nbytes)]
            self._all += fitting
        return fitting[0].lend(nbytes)

    def clear(self) -> None:
        """Forget all memory; what is lent goes when its tensors do."""
        self._all = []


class _Buffer:
    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, dtype=np.uint8)
        self._lent: weakref.ref[np.ndarray] | None = None

    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, nbytes: int) -> torch.Tensor:
        view = self.memory[:nbytes]
        self._lent = weakref.ref(view)
        return torch.from_numpy(view)  # its storage keeps `view` alive, and so does every tensor cut from it
