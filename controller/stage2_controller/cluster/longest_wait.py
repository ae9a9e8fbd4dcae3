"""The job that has waited for room for longest, and the one node that the controller keeps from its other jobs for it.

Without it a large job waits for as long as smaller ones come that fit beside what runs. Volcano's plugins `sla` and
`reservation` do the same. Pods of others are the scheduler's affair, and so is a job's host that Kueue has assigned.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stage2_controller.job import node_fit
from stage2_controller.job.key import Key
from stage2_controller.job.node_fit import Need, NodeInfo

NodesFor = Callable[[Key, Need], Sequence[NodeInfo]]
_LOOKED_AT = 8


@dataclass(frozen=True)
class _Kept:
    """A node that is kept for a job."""

    key: Key
    node: str
    priority: int


class LongestWait:
    """Who waits since when, and what is kept for whom. `patience_s`: how long a job waits before; 0: for ever."""

    def __init__(self, patience_s: float, clock: Callable[[], float]) -> None:
        self._patience_s = patience_s
        self._clock = clock
        self._since: dict[Key, float] = {}
        self._kept: _Kept | None = None

    def begin(self, key: Key) -> None:
        """Note that a job waits; one that does already has waited since then."""
        self._since.setdefault(key, self._clock())

    def end(self, key: Key) -> bool:
        """Note that a job waits no more; return whether a node was kept for it, which others may have now."""
        self._since.pop(key, None)
        kept = self._kept is not None and self._kept.key == key
        if kept:
            self._kept = None
        return kept

    def choose(self, waiting: Mapping[Key, Need], nodes_for: NodesFor) -> None:
        """Keep the node that comes closest for the first job whose patience has ended and that one could take.

        The highest priority is first, then who waits for longest. Only a few are looked at: it is done at every change.
        """
        self._kept = None
        due = [key for key in waiting if self._due(key)]
        for key in heapq.nsmallest(_LOOKED_AT, due, key=lambda key: (-waiting[key].priority, self._since[key])):
            if self._keep(key, waiting[key], nodes_for):
                return

    def choose_for(self, key: Key, need: Need, nodes_for: NodesFor) -> None:
        """Keep a node for this job if its patience has ended and none is kept."""
        if self._kept is None and self._due(key):
            self._keep(key, need, nodes_for)

    def _due(self, key: Key) -> bool:
        since = self._since.get(key)
        return self._patience_s > 0 and since is not None and self._clock() - since >= self._patience_s

    def _keep(self, key: Key, need: Need, nodes_for: NodesFor) -> bool:
        node = node_fit.closest_node(need, nodes_for(key, need))
        self._kept = _Kept(key, node, need.priority) if node else None
        return node is not None

    def first(self, key: Key) -> bool:
        """Return whether a node is kept for the job."""
        return self._kept is not None and self._kept.key == key

    def keeps(self, node: str, key: Key, need: Need) -> bool:
        """Return whether the node is kept from a job: for another one of at least its priority."""
        kept = self._kept
        if kept is None or need.host is not None:
            return False
        return kept.node == node and kept.key != key and kept.priority >= need.priority
