"""A worker's side of a transfer group, over any transport, the same for our vLLM engines and for the stub.

Over TCP the link itself brings the buckets, into main memory (`TcpInlet`).
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from stage2_api.vllm import TRANSPORT_PATH, Transport
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.tensors.announcement import TensorMeta, bucket_bytes, plan_buckets, unpack
from stage2_trainer.sync.transports.link import GroupInfo, Link, dial
from stage2_trainer.sync.transports.nccl import CreateCommunicator, NcclInlet, open_nccl
from stage2_trainer.wire.credentials import own_certificate, read_token
from stage2_trainer.wire.errors import LinkError, OtherGroupError, RepeatedCallError

Load = Callable[[list[tuple[str, torch.Tensor]]], Any]


class Receiver:
    """A member of the learner's group, which hands on the tensors that it sends.

    transport: what it receives over. device: where buckets arrive over NCCL. communicator: creates NCCL's side (None =
    NCCL itself).
    """

    def __init__(
        self, transport: Transport, device: torch.device, communicator: CreateCommunicator | None = None
    ) -> None:
        self._transport = transport
        self._device = device
        self._communicator = communicator
        self._inlet: TcpInlet | NcclInlet | None = None
        self._group = ""
        self._bucket_bytes = 0
        self._calls = itertools.count(1)
        self._joined_by = 0
        self._accepted = 0
        self._joining = threading.Lock()

    def join(self, info: GroupInfo, rank: int) -> None:
        """Enter the learner's group as `rank`, and leave the one before.

        A call may come late: its learner has given it up and called again, or another one has. Then it changes nothing.

        Raises:
            LinkError: nobody waits for this worker in that group, or whoever does proves nothing.
            ValueError: the learner sends over another transport.
        """
        if info.transport != self._transport:
            raise ValueError(
                f"the learner sends weights over {info.transport} and this server receives them over"
                f" {self._transport}: give both the same {TRANSPORT_PATH}"
            )
        call = next(self._calls)
        certificate = own_certificate(os.environ) if info.certificate else None
        link = dial(info, rank, token=read_token(os.environ), certificate=certificate)
        with self._joining:
            if call < self._joined_by:
                link.close()
                raise LinkError("the learner has called again meanwhile")
            self.leave_group()
            self._joined_by, self._accepted = call, 0
            self._inlet, self._group = self._open_inlet(link, info, rank), info.name
            self._bucket_bytes = info.packed_buffer_size_bytes

    def _open_inlet(self, link: Link, info: GroupInfo, rank: int) -> TcpInlet | NcclInlet:
        if self._transport == "tcp":
            return TcpInlet(link, info.timeout_s)
        return open_nccl(link, info, rank, self._device, self._communicator)

    def leave_group(self) -> None:
        """Leave the group; the learner notices at once."""
        if self._inlet is not None:
            self._inlet.close()
            self._inlet = None

    def accept(self, group: str, number: int) -> None:
        """Note the call by which a learner announces tensors; call it before `receive`.

        number: counts the calls of a group up. A proxy that repeats a call would make this worker wait for tensors that
        came already, and take the next push's for them.

        Raises:
            OtherGroupError: the tensors are sent in another group than the one that this worker has joined.
            RepeatedCallError: a call with this number, or a later one, was accepted in this group.
            RuntimeError: there is no group.
        """
        with self._joining:
            self._require(group)
            if number <= self._accepted:
                raise RepeatedCallError(number, self._accepted)
            self._accepted = number

    def _require(self, group: str) -> TcpInlet | NcclInlet:
        if self._inlet is None:
            raise RuntimeError("no transfer group: POST /init_weight_transfer_engine comes first")
        if group != self._group:
            raise OtherGroupError(group, self._group)
        return self._inlet

    def receive(self, tensors: Sequence[TensorMeta], load: Load, group: str) -> None:
        """Receive the announced tensors, calling `load` for each bucket while the next one arrives.

        group: the name of the group that they are sent in. Where anything fails it is left: the learner's next bucket
        would be taken for this one.

        Raises:
            OtherGroupError: they are sent in another group; the one that this worker is in stays as it is.
            LinkError: the group broke, or a bucket did not arrive in time.
            RuntimeError: there is no group.
        """
        with self._joining:
            inlet = self._require(group)
        try:
            _receive(inlet, list(plan_buckets(tensors, self._bucket_bytes)), load)
        except BaseException:
            inlet.close()
            if self._inlet is inlet:  # and not one that another learner has called for meanwhile
                self._inlet = None
            raise
        inlet.end_push()


def _receive(inlet: TcpInlet | NcclInlet, plan: Sequence[Sequence[TensorMeta]], load: Load) -> None:
    arriving = inlet.start(bucket_bytes(plan[0])) if plan else None
    for bucket, following in itertools.zip_longest(plan, plan[1:]):
        assert arriving is not None
        buffer = arriving.result()
        arriving = inlet.start(bucket_bytes(following)) if following is not None else None
        load(unpack(bucket, buffer))


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
        self._lent: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return memory that nothing else uses, uint8 of shape (nbytes,)."""
        free = [memory for memory, view in self._lent if view() is None]
        fitting = [memory for memory in free if memory.nbytes >= nbytes]
        memory = fitting[0] if fitting else np.empty(nbytes, dtype=np.uint8)
        view = memory[:nbytes]
        kept = [(other, lent) for other, lent in self._lent if lent() is not None or (fitting and other is not memory)]
        self._lent = [*kept, (memory, weakref.ref(view))]
        return torch.from_numpy(view)  # its storage keeps `view` alive, and so does every tensor cut from it

    def clear(self) -> None:
        """Forget all memory; what is lent goes when its tensors do."""
        self._lent = []
