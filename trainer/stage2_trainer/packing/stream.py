"""The rows of a stream of segments, each known long before the last segment is, and as few as there can be at its end.

What a row holds depends on the segments before it and on nothing else, least of all on time: a row is chosen as soon as
those that wait could fill one and a half and give some choice, by exact subset sums, the oldest always with it. What
waits at the end goes into the fewest rows that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from stage2_trainer.packing.bound import least_rows
from stage2_trainer.packing.buffer import PackingBuffer
from stage2_trainer.packing.errors import PackingError, check_lengths
from stage2_trainer.packing.window import pack_window

T = TypeVar("T")

SIGHT = 1.5  # rows' worth of tokens that must wait before a row is chosen of them: more fill rows better, but later
CHOICE = 8  # segments that must wait, for the same reason: of few long ones next to no choice fills a row


class RowStream(Generic[T]):
    """A packer of segments that come one after the other; no row is longer than `length` tokens."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: PackingBuffer[T] = PackingBuffer(packing_length=length, capacity=None)
        self._tokens = 0

    def add(self, item: T, length: int) -> list[T] | None:
        """Take the next segment; return a row if one is known now. It is never the last.

        Raises:
            PackingError: the segment is longer than a row.
        """
        self._waiting.insert([item], [length])
        self._tokens += length
        if self._tokens < SIGHT * self._length or len(self._waiting) < CHOICE:
            return None
        row = self._waiting.take()
        self._tokens -= row.total_len
        return list(row.items)

    def finish(self) -> list[list[T]]:
        """Return the rows of all that waits, the oldest segments first."""
        lengths, items = self._waiting.lengths, self._waiting.empty()
        self._tokens = 0
        return [[items[i] for i in row] for row in fewest_rows(lengths, self._length)]


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
