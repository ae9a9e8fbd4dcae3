"""Rows of segments: the fullest one with the oldest segment, and those of a whole step.

`select_segments` is exact, a subset sum: no token of a row is wasted that need not be (semantics, section 7).
`HalvedRows` yields rows of a step before all segments are there (section 8.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

SIGHT = 1.2  # rows' worth of tokens that a part must have before a row is taken of it: more fill rows better, but later
WAYS_TO_ROOM = (
    "rows hold less than micro-steps bring: reduce training.per_device_train_batch_size (training.effective_batch_size "
    "can stay), or begin a run with custom.extra.rollout_matching.post_rollout_pack_scope: step"
)
"""What keeps more and more segments from waiting."""
_UNREACHABLE = np.iinfo(np.uint16).max - 1


class PackingError(ValueError):
    """Segments that do not fit the rows that the configuration gives them; the message says which setting helps."""


def over_cap(length: int, cap: int) -> str:
    """Return the message for a segment of `length` tokens that fits no row of `cap`."""
    return (
        f"segment of {length} tokens; at most global_max_length = {cap} fit a row; raise global_max_length, "
        "lower custom.extra.rollout_matching.max_new_tokens, set custom.extra.rollout_matching."
        "post_rollout_overlong: cut, or set training.packing: false"
    )


def check_lengths(lengths: Sequence[int], cap: int) -> None:
    """Raise PackingError unless every segment has at least one token and fits a row alone."""
    for length in lengths:
        if length > cap:
            raise PackingError(over_cap(length, cap))
        if length < 1:
            raise PackingError(f"segment of {length} tokens; a segment has at least one; encode it again")


def select_segments(lengths: Sequence[int], cap: int) -> list[int]:
    """Return the indices (rising) of the segments of one row of at most `cap` tokens.

    lengths: of the segments in tokens, oldest first, each 1..cap. cap: tokens of a row.

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
    better = _fullest([lengths[i] for i in others], room)
    return (
        [0, *(others[i] for i in better)] if lengths[0] + sum(lengths[others[i]] for i in better) > total else in_order
    )


def _first_fit(lengths: Sequence[int], cap: int) -> tuple[list[int], int]:
    chosen, total = [], 0
    for i, length in enumerate(lengths):
        if total + length <= cap:
            chosen.append(i)
            total += length
    return chosen, total


def _fullest(lengths: Sequence[int], room: int) -> list[int]:
    """Return the set with the greatest sum <= room, then fewest members, then smallest indices."""
    # fewest[i, s]: members of the smallest set of the items i.. whose sum is s
    fewest = np.full((len(lengths) + 1, room + 1), _UNREACHABLE, dtype=np.uint16)
    fewest[:, 0] = 0
    for i in range(len(lengths) - 1, -1, -1):
        length = lengths[i]
        fewest[i, :length] = fewest[i + 1, :length]
        np.minimum(fewest[i + 1, length:], fewest[i + 1, : room + 1 - length] + np.uint16(1), out=fewest[i, length:])
    left = int(np.flatnonzero(fewest[0] < _UNREACHABLE)[-1])
    chosen = []
    for i, length in enumerate(lengths):
        if length <= left and fewest[i, left] == fewest[i + 1, left - length] + 1:
            chosen.append(i)
            left -= length
    return chosen


@dataclass(frozen=True)
class Selected(Generic[T]):
    """The segments of one row, oldest first, and the tokens that they have together."""

    items: tuple[T, ...]
    total_len: int


class PackingBuffer(Generic[T]):
    """Segments that wait for a row, oldest first; what one selection leaves waits for the next.

    capacity: most segments that may wait.
    """

    def __init__(self, *, packing_length: int, capacity: int) -> None:
        self._packing_length = packing_length
        self._capacity = capacity
        self._items: list[T] = []
        self._lengths: list[int] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> tuple[T, ...]:
        """The segments that wait, oldest first."""
        return tuple(self._items)

    def insert(self, items: Sequence[T], lengths: Sequence[int]) -> None:
        """Add segments behind those that wait, all or none.

        Raises:
            PackingError: one is longer than a row, or too many would wait.
        """
        check_lengths(lengths, self._packing_length)
        if len(self) + len(items) > self._capacity:
            raise PackingError(
                f"training.packing_buffer: {len(self)} segments wait, {len(items)} are new; {self._capacity} may wait; "
                f"{WAYS_TO_ROOM}, and raise training.packing_buffer for those that wait"
            )
        self._items.extend(items)
        self._lengths.extend(lengths)

    def empty(self) -> list[T]:
        """Remove and return all that wait, oldest first."""
        items, self._items, self._lengths = self._items, [], []
        return items

    def take(self) -> Selected[T]:
        """Remove and return the segments of the next row; none when the buffer is empty."""
        chosen = select_segments(self._lengths, self._packing_length)
        taken = Selected(tuple(self._items[i] for i in chosen), sum(self._lengths[i] for i in chosen))
        left = sorted(set(range(len(self))) - set(chosen))
        self._items = [self._items[i] for i in left]
        self._lengths = [self._lengths[i] for i in left]
        return taken


def first_fit_decreasing(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Partition segments into few rows of at most `cap` tokens: longest first, into the first row with room.

    Each row's indices rise, rows are in the order of their first index.

    >>> first_fit_decreasing([6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    check_lengths(lengths, cap)
    rows: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((k for k, room in enumerate(rooms) if room >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(cap)
        rows[row].append(i)
        rooms[row] -= lengths[i]
    return sorted(map(sorted, rows))


class HalvedRows:
    """The rows of `count` segments that arrive in any order; most are known before all segments have arrived.

    The list is halved again and again. Once both halves of a part are complete, rows are filled from their leftovers
    while at least `SIGHT` rows' worth of them remains; the rest passes to the part that contains it. Leftovers of the
    whole list are packed first-fit decreasing, by `finish`. So a row depends on the segments of its part and never on
    time, and a segment that comes late holds up the parts that it is in and no other. Rows are lists of rising places;
    none is longer than `length` tokens.
    """

    def __init__(self, length: int, count: int) -> None:
        self._length = length
        self._whole = range(count)
        self._lengths: dict[int, int] = {}
        self._left: dict[range, list[int]] = {}  # of each part that is complete and whose other half is not

    def add(self, place: int, length: int) -> list[list[int]]:
        """Take the segment at a place of the list; return the rows that are known with it.

        Raises:
            PackingError: the segment is longer than a row.
        """
        check_lengths([length], self._length)
        self._lengths[place] = length
        left = [place]
        rows: list[list[int]] = []
        for half, part in pairwise(reversed([*_parts(self._whole, place)])):
            other = self._left.pop(_other(part, half), None)
            if other is None:
                self._left[half] = left
                return rows
            left = left + other if half.start == part.start else other + left
            while part != self._whole and sum(map(self._lengths.__getitem__, left)) >= SIGHT * self._length:
                chosen = select_segments([self._lengths[one] for one in left], self._length)
                rows.append([left[i] for i in chosen])
                left = [one for one in left if one not in rows[-1]]
        self._left[self._whole] = left
        return rows

    def finish(self) -> list[list[int]]:
        """Return the rows of all that is left; every segment has arrived."""
        left = self._left.pop(self._whole, [])
        rows = first_fit_decreasing([self._lengths[one] for one in left], self._length)
        return [[left[i] for i in row] for row in rows]


def _parts(whole: range, place: int) -> Iterator[range]:
    """Yield the parts of a list that a place is in, from the whole list down to the place alone."""
    yield whole
    while len(whole) > 1:
        middle = whole.start + (len(whole) + 1) // 2
        whole = range(whole.start, middle) if place < middle else range(middle, whole.stop)
        yield whole


def _other(part: range, half: range) -> range:
    return range(half.stop, part.stop) if half.start == part.start else range(part.start, half.start)
