"""The NCCL group of a learner on a GPU and the workers of one `swift rollout` server."""

from __future__ import annotations

import time

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup

POLL_INTERVAL_S = 0.0005


class NcclSwiftGroup:
    """A member of the group that the server holds; the learner has the highest rank."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._group = StatelessProcessGroup.create(host, port, rank, world_size, store_timeout=int(timeout_s))
        self._communicator = PyNcclCommunicator(self._group, device=torch.device("cuda", torch.cuda.current_device()))

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
        self._group.barrier(timeout=timeout_s)
