"""Reservations on one node, summed when somebody asks after a change: other questions cost the same. Pure."""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable

from stage2_controller.spec.quantity import Amounts


class Reservations:
    """Entries of one node by an identity of the caller's choice, each with amounts and a priority."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Amounts, int]] = {}
        self._by_priority: dict[int, dict[Hashable, Amounts]] = defaultdict(dict)
        self._sums: dict[int, dict[str, float]] = {}  # of the priorities that have not changed since

    def add(self, identity: Hashable, amounts: Amounts, priority: int) -> None:
        """Add the entry; one that was there under the same identity goes."""
        if self._entries.get(identity) == (amounts, priority):
            return
        self.remove(identity)
        self._entries[identity] = amounts, priority
        self._by_priority[priority][identity] = amounts
        self._sums.pop(priority, None)

    def remove(self, identity: Hashable) -> None:
        """Remove the entry, if there is one."""
        entry = self._entries.pop(identity, None)
        if entry is None:
            return
        _, priority = entry
        del self._by_priority[priority][identity]
        self._sums.pop(priority, None)
        if not self._by_priority[priority]:
            del self._by_priority[priority]

    def get(self, identity: Hashable) -> tuple[Amounts, int] | None:
        """Return amounts and priority of one entry."""
        return self._entries.get(identity)

    def total(self, *, at_least: int | None = None) -> dict[str, float]:
        """Return the sum of all entries, or of those with this priority or a higher one."""
        counted = (priority for priority in self._by_priority if at_least is None or priority >= at_least)
        return _sum(self._sum_of(priority) for priority in counted)

    def _sum_of(self, priority: int) -> dict[str, float]:
        if priority not in self._sums:
            self._sums[priority] = _sum(self._by_priority[priority].values())
        return self._sums[priority]


def _sum(amounts: Iterable[Amounts]) -> dict[str, float]:
    """Return the sums of what is there. A difference to an older sum would keep what that one has lost by rounding."""
    by_resource: dict[str, list[float]] = defaultdict(list)
    for one in amounts:
        for key, amount in one.items():
            by_resource[key].append(amount)
    return {key: math.fsum(listed) for key, listed in by_resource.items()}
