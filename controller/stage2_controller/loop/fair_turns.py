"""The order in which a work queue serves its keys: each owner gets its turn, however many keys the others have.

Within one owner's keys, those that were never worked on come first, so that what a new object needs is created before
what others did is told; but after a few of them one that is known has its turn, or a stream of new objects would keep
their owner's own repairs waiting for ever.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

NEW_FOR_A_KNOWN = 4
"""Keys that were never worked on, of one owner, between two that were, while both wait."""

Item = TypeVar("Item")


class _Lanes(Generic[Item]):
    def __init__(self) -> None:
        self.new: deque[Item] = deque()
        self.known: deque[Item] = deque()
        self._new_in_a_row = 0

    def __len__(self) -> int:
        return len(self.new) + len(self.known)

    def pop(self) -> Item:
        if self.new and (not self.known or self._new_in_a_row < NEW_FOR_A_KNOWN):
            self._new_in_a_row += 1
            return self.new.popleft()
        self._new_in_a_row = 0
        return self.known.popleft()


class FairTurns(Generic[Item]):
    """Keys that wait, each in the lanes of its owner; owners take turns, in the order in which they came to wait."""

    def __init__(self, owner_of: Callable[[Item], Hashable]) -> None:
        self._owner_of = owner_of
        self._owners: OrderedDict[Hashable, _Lanes[Item]] = OrderedDict()

    def put(self, item: Item, *, new: bool) -> None:
        """Let an item wait behind the others of its owner; `new`: it was never worked on."""
        lanes = self._owners.setdefault(self._owner_of(item), _Lanes())
        (lanes.new if new else lanes.known).append(item)

    def pop(self) -> Item:
        """Return the item whose turn it is. Raises StopIteration where none waits."""
        owner = next(iter(self._owners))
        lanes = self._owners[owner]
        item = lanes.pop()
        if lanes:
            self._owners.move_to_end(owner)
        else:
            del self._owners[owner]
        return item
