"""The transfer group of a learner and one `swift rollout` server: over NCCL, or over gloo for the CPU stub.

The server's first worker holds the store, workers have ranks from 0, and the learner has the highest rank.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroupGloo, Store, TCPStore

from stage2_trainer.sync.transports.link import address_towards
from stage2_trainer.sync.transports.nccl_group import UNIQUE_ID_BYTES

POLL_INTERVAL_S = 0.0005
FIRST_WORKER = 0
_START = rb"\x80[\x04\x05]\x95%b\x00{7}"  # protocol 4 of Python to 3.13, 5 from 3.14 on; the length of the one frame
UNIQUE_ID = re.compile(
    _START % re.escape(b"\xec")
    + re.escape(b"\x8c\x07_ctypes\x94\x8c\x09_unpickle\x94\x93\x94")
    + re.escape(b"\x8c\x34vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94")
    + re.escape(b"}\x94C\x80")
    + rb"(?P<value>.{%d})" % UNIQUE_ID_BYTES
    + re.escape(b"\x94\x86\x94\x86\x94R\x94."),
    re.DOTALL,
)
BARRIER = re.compile(_START % re.escape(b"\x30") + re.escape(b"\x8c\x2c") + rb"(?P<value>barrier_[0-9a-f-]{36})\x94\.")


class GlooSwiftGroup:
    """A member of a group over gloo. `swift rollout` itself has NCCL only; the stub has this."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        patience = timedelta(seconds=timeout_s)
        store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=patience, wait_for_workers=False)
        self._group: Any = gloo_process_group(
            store, rank, world_size, address=address_towards(host, port), timeout_s=timeout_s
        )
        self.world_size = world_size

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Broadcast `buffer` from the highest rank, then meet the others."""
        self._group.broadcast(buffer, root=self.world_size - 1).wait(timedelta(seconds=timeout_s))
        self._group.barrier().wait(timedelta(seconds=timeout_s))

    receive = send


class NcclSwiftGroup:
    """The learner in the group of a server on GPUs."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self._rank = rank
        self._store = SwiftStore(host, port, rank=rank, world_size=world_size, timeout_s=timeout_s)
        device = torch.device("cuda", torch.cuda.current_device())
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(self._store.unique_id(), rank, world_size, device)

    def send(self, buffer: torch.Tensor, timeout_s: float) -> None:
        """Broadcast `buffer` from the learner, then meet the others.

        Raises:
            RuntimeError: the broadcast did not end within `timeout_s`, or a server did not come to the barrier.
        """
        stream = torch.cuda.current_stream(buffer.device)
        self._communicator.broadcast(buffer, src=self._rank, stream=stream)
        sent = stream.record_event()
        deadline = time.monotonic() + timeout_s
        while not sent.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"broadcast not received within {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
        self._store.meet(timeout_s)


SwiftGroup = NcclSwiftGroup | GlooSwiftGroup


class SwiftStore:
    """The learner's place in the store of a server on GPUs, read without unpickling.

    It is vLLM's StatelessProcessGroup, a TCPStore that authenticates nobody: whoever reaches its port may write a key
    before the server does. Members unpickle what lies there, and a pickle can run anything. Only two things are ever
    sent in it, NCCL's id and the name of a barrier, and their pickles differ in nothing but the value. So the bytes are
    compared with these two forms, and nothing else is read. Source: vllm/distributed/utils.py, vLLM 0.32.

    timeout_s: seconds that joining it, and the id, may take.

    Raises:
        RuntimeError: nobody holds a store there, or not all members came.
    """

    def __init__(self, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._read = 0
        patience = timedelta(seconds=timeout_s)
        self._store = TCPStore(host, port, world_size, is_master=False, timeout=patience, use_libuv=False)

    def unique_id(self) -> bytes:
        """Return NCCL's id of the group. Raises RuntimeError if it does not come in time, or is something else."""
        return self._next_value(UNIQUE_ID, "NCCL's id", self._timeout_s)

    def meet(self, timeout_s: float) -> None:
        """Wait until all members are at the next barrier. Raises RuntimeError as `unique_id`."""
        barrier = self._next_value(BARRIER, "the name of a barrier", timeout_s).decode()
        self._store.set(f"arrival_{barrier}_{self._rank}", "1")
        arrivals = [f"arrival_{barrier}_{rank}" for rank in range(self._world_size)]
        self._store.wait(arrivals, timedelta(seconds=timeout_s))
        self._store.set(f"departure_{barrier}_{self._rank}", "1")

    def _next_value(self, form: re.Pattern[bytes], what: str, timeout_s: float) -> bytes:
        """Return the next value that the first worker has sent to all."""
        key = f"broadcast_from/{FIRST_WORKER}/{self._read}"
        self._store.wait([key], timedelta(seconds=timeout_s))
        found = form.fullmatch(self._store.get(key))
        if found is None:
            raise RuntimeError(
                f"{key} of the server's store is not {what}, and was not read: a stranger has written it, or the server"
                " runs another version of vLLM"
            )
        self._read += 1
        return found["value"]


def gloo_process_group(store: Store, rank: int, world_size: int, *, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Return a gloo group over `store`; blocks until every rank has come, at most `timeout_s`.

    address: the local address at which the other ranks reach this one. timeout_s: limit of any wait in the group.

    It uses torch 2.13's private constructors: `torch.distributed.new_group` makes groups among the processes of the
    default group alone, and a learner and its servers share none. No upstream issue found. Goes when torch can make a
    group of a store and a rank without `init_process_group`.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, world_size, options)
