"""The limit that a sync is measured against: a gloo broadcast of the same bytes in the same pieces, and nothing else.

Buffers are as those of a sync: two on the learner, filled once, and two on a server, used in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from stage2_trainer.wire.torch_compat import gloo_process_group

Keep = Callable[[int, torch.Tensor], None]
LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0


def group(port: int, rank: int) -> Any:
    """Return the group of the learner (rank 0, which holds the store) and one server; blocks until both are there."""
    patience = timedelta(seconds=PATIENCE_S)
    store = TCPStore(LOOPBACK, port, is_master=rank == 0, timeout=patience, wait_for_workers=False)
    return gloo_process_group(store, rank, 2, address=LOOPBACK, timeout_s=PATIENCE_S)


def broadcast(groups: Sequence[Any], sizes: Sequence[int], keep: Keep | None = None) -> None:
    """Send, or receive, buffers of these sizes in all groups, two at a time.

    keep: what is done with each that is there.
    """
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8) for _ in range(2)]
    flying: list[Any] = []
    for number, size in enumerate(sizes):
        started = [group.broadcast(buffers[number % 2][:size], root=0) for group in groups]
        _land(flying, number - 1, buffers, sizes, keep)
        flying = started
    _land(flying, len(sizes) - 1, buffers, sizes, keep)


def _land(
    flying: Sequence[Any], number: int, buffers: Sequence[torch.Tensor], sizes: Sequence[int], keep: Keep | None
) -> None:
    for work in flying:
        work.wait()
    if keep is not None and number >= 0:
        keep(number, buffers[number % 2][: sizes[number]])
