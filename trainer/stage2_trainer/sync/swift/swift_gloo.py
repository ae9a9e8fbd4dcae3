"""The group of a learner and a server that speaks the `swift rollout` protocol, over gloo, for the CPU.

`swift rollout` itself has NCCL only; the stub has this. The server's first worker holds the store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from stage2_trainer.sync.transports.torch_compat import gloo_process_group
from stage2_trainer.sync.transports.transfer_group import address_towards


class GlooSwiftGroup:
    """Workers have ranks from 0, the learner has the highest."""

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
