"""The job that has waited for room for longest, and the one node that the controller keeps from its other jobs for it.

Without it a large job waits for as long as smaller ones come that fit beside what runs. Volcano's plugins `sla` and
`reservation` do the same. Pods of others are the scheduler's affair, and so is a job's host that Kueue has assigned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import Need, NodeInfo
from stage2_controller.spec.key import Key

Rooms = Callable[[Key, Need], Sequence[NodeInfo]]
"""The nodes in the eyes of a job; allocatable: what is free once the controller's own jobs have ended."""
LOOKED_AT = 4  # of the jobs whose patience has ended: it is done at every change
HOPELESS_S = 300.0


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
        self._hopeless: dict[Key, float] = {}  # until when no node is looked for
        self._kept: _Kept | None = None

    def begin(self, key: Key) -> None:
        """Note that a job waits; one that does already has waited since then."""
        self._since.setdefault(key, self._clock())

    def end(self, key: Key) -> bool:
        """Note that a job waits no more; return whether a node was kept for it, which others may have now."""
        self._since.pop(key, None)
        self._hopeless.pop(key, None)
        kept = self.first(key)
        if kept:
            self._kept = None
        return kept

    def choose(self, waiting: Mapping[Key, Need], rooms: Rooms) -> None:
        """Keep the node that comes closest for the first job whose patience has ended and that one could take.

        The highest priority is first, then who waits for longest. Who has a node keeps one until it waits no more, or
        a higher priority's patience ends.
        """
        due = sorted(
            (key for key in waiting if self._due(key)), key=lambda key: (-waiting[key].priority, self._since[key])
        )
        kept, self._kept = self._kept, None
        if kept and kept.key in due and waiting[due[0]].priority <= kept.priority:
            due = [kept.key, *due]
        tried: list[Need] = []
        for key in due:
            need = waiting[key]
            if need in tried:
                self._hopeless[key] = self._clock() + HOPELESS_S
            elif len(tried) == LOOKED_AT or self._keep(key, need, rooms):
                return
            else:
                tried.append(need)

    def choose_for(self, key: Key, need: Need, rooms: Rooms) -> None:
        """Keep a node for this job if its patience has ended and none is kept."""
        if self._kept is None and self._due(key):
            self._keep(key, need, rooms)

    def _due(self, key: Key) -> bool:
        now, since = self._clock(), self._since.get(key)
        waited = self._patience_s > 0 and since is not None and now - since >= self._patience_s
        return waited and self._hopeless.get(key, now) <= now

    def _keep(self, key: Key, need: Need, rooms: Rooms) -> bool:
        node = node_fit.closest_node(need, rooms(key, need))
        if node is None:
            self._hopeless[key] = self._clock() + HOPELESS_S
            return False
        self._kept = _Kept(key, node, need.priority)
        return True

    def first(self, key: Key) -> bool:
        """Return whether a node is kept for the job."""
        return self._kept is not None and self._kept.key == key

    def keeps(self, node: str, key: Key, need: Need) -> bool:
        """Return whether the node is kept from a job: for another one of at least its priority."""
        kept = self._kept
        if kept is None or need.host is not None:
            return False
        return kept.node == node and kept.key != key and kept.priority >= need.priority
