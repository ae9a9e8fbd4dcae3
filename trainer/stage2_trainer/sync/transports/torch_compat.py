"""gloo groups outside torch's default group, by torch 2.13's private constructors.

`torch.distributed.new_group` makes groups among the processes of the default group alone, and a learner and its servers
share none. No public constructor exists; no upstream issue found. Goes when torch can make a group of a store and a
rank without `init_process_group`.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import ProcessGroupGloo, Store


def gloo_process_group(store: Store, rank: int, world_size: int, *, address: str, timeout_s: float) -> ProcessGroupGloo:
    """Return a group over `store`; blocks until every rank has come, at most `timeout_s`.

    address: the local address that the other ranks reach this one at. timeout_s: limit of any wait in the group.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # absent from torch's stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, world_size, options)
