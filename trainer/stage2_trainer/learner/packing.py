"""Which segments share a row: exact choices, so that no token of a row is wasted that need not be.

`select_segments` fills one row and always takes the oldest segment; `PackingBuffer` carries the rest over.
`pack_window` spreads all segments of an accumulation window over exactly as many rows as it has micro-steps.
Source: semantics, sections 7 and 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from stage2_trainer.learner.packing_errors import PackingError, check_lengths
from stage2_trainer.learner.packing_window import pack_window

__all__ = ["PackingBuffer", "PackingError", "Selected", "pack_window", "select_segments"]

T = TypeVar("T")
_BLOCK = 32
_FEW = 6  # segments of mean length that fill the room, up to which layers are the quicker way
Counts = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Selected(Generic[T]):
    """The segments of one row, oldest first, and the tokens that they have together."""

    items: tuple[T, ...]
    total_len: int


class PackingBuffer(Generic[T]):
    """Segments that wait for a row, oldest first; what one selection leaves is carried over to the next."""

    def __init__(self, *, packing_length: int, capacity: int) -> None:
        self._packing_length = packing_length
        self._capacity = capacity
        self._items: list[T] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    def insert(self, items: Sequence[T], lengths: Sequence[int]) -> None:
        """Add segments behind those that wait; nothing and a PackingError when one is too long or they are too many."""
        check_lengths(lengths, self._packing_length)
        if len(self) + len(items) > self._capacity:
            raise PackingError(
                f"training.packing_buffer: {len(self)} segments wait, {len(items)} are new; {self._capacity} may wait; "
                "reduce training.per_device_train_batch_size, or raise training.packing_buffer"
            )
        self._items.extend(items)
        self._lengths.extend(lengths)

    def take(self) -> Selected[T]:
        """Remove and return the segments of the next row; none when the buffer is empty."""
        chosen = select_segments(self._lengths, self._packing_length)
        taken = Selected(tuple(self._items[i] for i in chosen), sum(self._lengths[i] for i in chosen))
        left = sorted(set(range(len(self))) - set(chosen))
        self._items = [self._items[i] for i in left]
        self._lengths = [self._lengths[i] for i in left]
        return taken


def select_segments(lengths: Sequence[int], cap: int) -> list[int]:
    """Indices (rising) of the segments of one row of at most `cap` tokens.

    The oldest (index 0) is always in; the total is the greatest that any set with it reaches. Taking segments in order
    as they fit is kept unless another set is strictly longer; of those the one with the fewest segments wins, then the
    smallest indices.
    """
    if not lengths:
        return []
    check_lengths(lengths, cap)
    in_order, total = _first_fit(lengths, cap)
    room = cap - lengths[0]
    others = [i for i in range(1, len(lengths)) if lengths[i] <= room]
    if total == cap or not others:
        return in_order
    better = _longest_subset([lengths[i] for i in others], room, more_than=total - lengths[0])
    return [0, *(others[i] for i in better)] if better else in_order


def _first_fit(lengths: Sequence[int], cap: int) -> tuple[list[int], int]:
    chosen, total = [], 0
    for i, length in enumerate(lengths):
        if total + length <= cap:
            chosen.append(i)
            total += length
    return chosen, total


def _longest_subset(lengths: list[int], room: int, *, more_than: int) -> list[int]:
    """Indices of the subset with the greatest sum <= room, then the fewest members, then the smallest index tuple.

    Empty when no sum is greater than `more_than`.
    """
    few_suffice = sum(lengths) * _FEW >= room * len(lengths)
    return (_subset_of_few if few_suffice else _subset_of_many)(lengths, room, more_than=more_than)


def _subset_of_many(lengths: list[int], room: int, *, more_than: int) -> list[int]:
    """The same by a dynamic programme over sums, from the last item to the first, whatever the number of members.

    Row i counts the fewest of the items i.. that make each sum. Only every 32nd row is kept, the others are computed
    again where needed.
    """
    rows = _Rows(lengths, room, np.uint8)
    best = rows.greatest_sum()
    if best < room:  # perhaps only because more than 254 items would be needed
        rows = _Rows(lengths, room, np.uint32)
        best = rows.greatest_sum()
    return rows.trace(best) if best > more_than else []


def _subset_of_few(lengths: list[int], room: int, *, more_than: int) -> list[int]:
    """The same by layers, one for each number of members, so that subsets of few are found soon.

    Sets of sums are integers whose bit r says that r tokens of the room
    can be left: to add a segment is to shift them right, and what would not fit falls out.
    """
    nothing = 1 << room
    left = _least_room_left(lengths, nothing)
    if room - left <= more_than:
        return []
    layers = [[nothing] * (len(lengths) + 1)]  # layers[k][i]: what k of the segments i.. can leave
    while not layers[-1][0] >> left & 1:
        layers.append(_with_one_more(lengths, layers[-1]))
    chosen: list[int] = []
    wanted = left  # room left by the segments that are still to be chosen
    for i, length in enumerate(lengths):
        fewer = len(layers) - 2 - len(chosen)
        if fewer < 0:
            break
        if layers[fewer][i + 1] >> (wanted + length) & 1:
            chosen.append(i)
            wanted += length
    return chosen


def _least_room_left(lengths: list[int], nothing: int) -> int:
    """The least room that any subset leaves."""
    reachable = nothing
    for length in lengths:
        reachable |= reachable >> length
        if reachable & 1:
            return 0
    return (reachable & -reachable).bit_length() - 1


def _with_one_more(lengths: list[int], layer: list[int]) -> list[int]:
    """The layer of subsets with one segment more."""
    sums = 0
    more = [0] * len(layer)
    for i in range(len(lengths) - 1, -1, -1):
        sums |= layer[i + 1] >> lengths[i]
        more[i] = sums
    return more


class _Rows:
    """The rows of the dynamic programme: `counts[s]` = fewest items that sum to s, `unreachable` where none (or more)
    do.

    The smallest type keeps a row in the processor's first cache.
    """

    def __init__(self, lengths: list[int], room: int, dtype: type[np.unsignedinteger]) -> None:
        self._lengths = lengths
        self._unreachable = int(np.iinfo(dtype).max) - 1
        self._scratch: Counts = np.empty(room + 1, dtype=dtype)
        self._after: Counts = np.empty((_BLOCK, room + 1), dtype=dtype)
        counts: Counts = np.full(room + 1, self._unreachable, dtype=dtype)
        counts[0] = 0
        self._kept = {len(lengths): counts.copy()}
        for i in range(len(lengths) - 1, -1, -1):
            self._add(counts, lengths[i])
            if i % _BLOCK == 0:
                self._kept[i] = counts.copy()

    def greatest_sum(self) -> int:
        return int(np.flatnonzero(self._kept[0] < self._unreachable)[-1])

    def trace(self, total: int) -> list[int]:
        """The smallest index tuple among the sets with the fewest items that sum to `total`."""
        chosen: list[int] = []
        left = int(self._kept[0][total])
        for start in range(0, len(self._lengths), _BLOCK):
            if left and self._may_hold_one(start, total, left):
                for i, after in self._block(start):
                    length = self._lengths[i]
                    if left and length <= total and after[total - length] == left - 1:
                        chosen.append(i)
                        total -= length
                        left -= 1
        return chosen

    def _add(self, counts: Counts, length: int) -> None:
        one_more = self._scratch[: len(counts) - length]
        np.add(counts[: len(one_more)], 1, out=one_more)
        np.minimum(counts[length:], one_more, out=counts[length:])

    def _may_hold_one(self, start: int, total: int, left: int) -> bool:
        """Whether an item of the block can belong to the set: the row of the whole block allows it."""
        counts = self._kept[start]
        block = self._lengths[start : start + _BLOCK]
        return any(length <= total and counts[total - length] < left for length in block)

    def _block(self, start: int) -> list[tuple[int, Counts]]:
        """Each item of a block with the row of the items after it."""
        end = min(start + _BLOCK, len(self._lengths))
        counts = self._kept[end].copy()
        for i in range(end - 1, start - 1, -1):
            self._after[i - start] = counts
            self._add(counts, self._lengths[i])
        return [(i, self._after[i - start]) for i in range(start, end)]
