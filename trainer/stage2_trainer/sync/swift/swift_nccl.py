"""The NCCL group of a learner on a GPU and the workers of one `swift rollout` server."""

from __future__ import annotations

import time

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

from stage2_trainer.sync.swift.swift_store import SwiftStore

POLL_INTERVAL_S = 0.0005


class NcclSwiftGroup:
    """A member of the group that the server holds; the learner has the highest rank."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
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
                raise RuntimeError(f"broadcast not taken within {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
        self._store.meet(timeout_s)
