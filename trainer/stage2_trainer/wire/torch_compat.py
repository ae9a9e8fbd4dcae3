"""gloo groups outside torch's default group, by torch 2.13's private constructors.

`torch.distributed.new_group` makes groups among the processes of the default group alone, and a learner and its servers
share none. No public constructor exists; no upstream issue found. Goes when torch can make a group of a store and a
rank without `init_process_group`.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from torch._C._distributed_c10d import ProcessGroupGloo, Store

LEAVE_TIMEOUT_S = 1.0


def gloo_process_group(store: Store, rank: int, world_size: int, *, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Return a group over `store`; blocks until every rank has come, at most `timeout_s`.

    address: the local address that the other ranks reach this one at. timeout_s: limit of any wait in the group.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, world_size, options)


def drop_gloo_group(group: list[ProcessGroupGloo]) -> None:
    """Empty a list that holds the only reference to a group, in a thread, which is waited for `LEAVE_TIMEOUT_S`.

    With a peer that stands still in a broadcast, gloo takes until the group's deadline to give a group up, and its
    abort() does nothing (pytorch/pytorch#130345, pytorch/gloo#388). Without such a peer it takes no time, and the port
    is free when this returns. Goes when `ProcessGroupGloo` can be aborted.
    """
    leaving = threading.Thread(target=group.clear, daemon=True, name="leave-gloo-group")
    leaving.start()
    leaving.join(LEAVE_TIMEOUT_S)
