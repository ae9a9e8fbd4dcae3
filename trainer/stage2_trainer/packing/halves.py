"""The rows of a list whose segments come in any order, each known long before all are there, and few in the end.

The list is halved again and again. When all of a part are there, rows are taken of what its own two halves have left,
while that would fill one and a fifth; the rest goes up to the part that this one is a half of. What is left of the
whole list goes into the fewest rows that hold it. So a row depends on the segments of its part and on nothing else,
least of all on time: one that comes late holds up the parts that it is in, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from stage2_trainer.packing.bound import least_rows
from stage2_trainer.packing.buffer import PackingBuffer
from stage2_trainer.packing.errors import PackingError, check_lengths
from stage2_trainer.packing.window import pack_window

SIGHT = 1.2  # rows' worth of tokens that a part must have before a row is taken of it: more fill rows better, but later


class HalvedRows:
    """A packer of `count` segments that come in any order; no row is longer than `length` tokens.

    Rows are lists of rising places in the list.
    """

    def __init__(self, length: int, count: int) -> None:
        self._length = length
        self._whole = range(count)
        self._left: dict[range, PackingBuffer[int]] = {}  # of each part that is there and whose other half is not

    def add(self, place: int, length: int) -> list[list[int]]:
        """Take the segment at a place of the list; return the rows that are known with it.

        Raises:
            PackingError: the segment is longer than a row.
        """
        left: PackingBuffer[int] = self._buffer([place], [length])
        rows: list[list[int]] = []
        for half, part in pairwise(reversed([*_parts(self._whole, place)])):
            other = self._left.pop(_other(part, half), None)
            if other is None:
                self._left[half] = left
                return rows
            first, second = (left, other) if half.start == part.start else (other, left)
            left = self._buffer([*first.items, *second.items], [*first.lengths, *second.lengths])
            if part != self._whole:
                rows += self._taken(left)
        self._left[self._whole] = left
        return rows

    def finish(self) -> list[list[int]]:
        """Return the rows of all that is left; every segment is there."""
        left = self._left.pop(self._whole, None)
        if left is None:
            return []
        return [[left.items[i] for i in row] for row in fewest_rows(left.lengths, self._length)]

    def _buffer(self, places: Sequence[int], lengths: Sequence[int]) -> PackingBuffer[int]:
        buffer: PackingBuffer[int] = PackingBuffer(packing_length=self._length, capacity=None)
        buffer.insert(places, lengths)
        return buffer

    def _taken(self, left: PackingBuffer[int]) -> Iterator[list[int]]:
        while sum(left.lengths) >= SIGHT * self._length:
            yield list(left.take().items)


def _parts(whole: range, place: int) -> Iterator[range]:
    """Yield the parts of a list that a place is in, from the whole list down to the place alone."""
    yield whole
    while len(whole) > 1:
        middle = whole.start + (len(whole) + 1) // 2
        whole = range(whole.start, middle) if place < middle else range(middle, whole.stop)
        yield whole


def _other(part: range, half: range) -> range:
    return range(half.stop, part.stop) if half.start == part.start else range(part.start, half.start)


def fewest_rows(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Partition segments into as few rows of at most `cap` tokens as can be found; each row's indices rise.

    >>> fewest_rows([6, 5, 4, 3], 10)
    [[0, 2], [1, 3]]
    """
    if not lengths:
        return []
    check_lengths(lengths, cap)
    for rows in range(least_rows(sorted(lengths, reverse=True), cap), len(lengths)):
        try:
            return pack_window(lengths, cap, rows)
        except PackingError:
            continue
    return [[i] for i in range(len(lengths))]
