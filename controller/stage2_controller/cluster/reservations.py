"""Reservations on one node, summed as entries come and go: asking costs the same however many there are. Pure."""

from collections.abc import Hashable

from stage2_controller.job.quantity import Amounts


class Reservations:
    """Entries of one node by an identity of the caller's choice, each with amounts and a priority."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Amounts, int]] = {}
        self._sums: dict[int, dict[str, float]] = {}
        self._counts: dict[int, int] = {}

    def add(self, identity: Hashable, amounts: Amounts, priority: int) -> None:
        """Add the entry; one that was there under the same identity goes."""
        if self._entries.get(identity) == (amounts, priority):
            return
        self.remove(identity)
        self._entries[identity] = amounts, priority
        self._counts[priority] = self._counts.get(priority, 0) + 1
        sums = self._sums.setdefault(priority, {})
        for key, amount in amounts.items():
            sums[key] = sums.get(key, 0) + amount

    def remove(self, identity: Hashable) -> None:
        """Remove the entry, if there is one."""
        entry = self._entries.pop(identity, None)
        if entry is None:
            return
        amounts, priority = entry
        self._counts[priority] -= 1
        if not self._counts[priority]:  # and with it what rounding has left
            del self._counts[priority], self._sums[priority]
            return
        for key, amount in amounts.items():
            self._sums[priority][key] -= amount

    def get(self, identity: Hashable) -> tuple[Amounts, int] | None:
        """Return amounts and priority of one entry."""
        return self._entries.get(identity)

    def total(self, *, at_least: int | None = None) -> dict[str, float]:
        """Return the sum of all entries, or of those with this priority or a higher one."""
        total: dict[str, float] = {}
        for priority, sums in self._sums.items():
            if at_least is None or priority >= at_least:
                for key, amount in sums.items():
                    total[key] = total.get(key, 0) + amount
        return total
