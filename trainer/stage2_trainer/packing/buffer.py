"""The choice of segments that share a row: exact, so that no token of a row is wasted that need not be.

`select_segments` fills one row and always takes the oldest segment; `PackingBuffer` carries the rest over.
Source: semantics, section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from stage2_trainer.packing.errors import PackingError, check_lengths
from stage2_trainer.packing.subset import longest_subset

T = TypeVar("T")


@dataclass(frozen=True)
class Selected(Generic[T]):
    """The segments of one row, oldest first, and the tokens that they have together."""

    items: tuple[T, ...]
    total_len: int


class PackingBuffer(Generic[T]):
    """Segments that wait for a row, oldest first; what one selection leaves is carried over to the next.

    capacity: most segments that may wait; None = as many as there are.
    """

    def __init__(self, *, packing_length: int, capacity: int | None) -> None:
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

    @property
    def lengths(self) -> tuple[int, ...]:
        """Their lengths in tokens."""
        return tuple(self._lengths)

    def insert(self, items: Sequence[T], lengths: Sequence[int]) -> None:
        """Add segments behind those that wait; nothing and a PackingError when one is too long or they are too many."""
        check_lengths(lengths, self._packing_length)
        if self._capacity is not None and len(self) + len(items) > self._capacity:
            raise PackingError(
                f"training.packing_buffer: {len(self)} segments wait, {len(items)} are new; {self._capacity} may wait; "
                "reduce training.per_device_train_batch_size, or raise training.packing_buffer"
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
    better = longest_subset([lengths[i] for i in others], room, more_than=total - lengths[0])
    return [0, *(others[i] for i in better)] if better else in_order


def _first_fit(lengths: Sequence[int], cap: int) -> tuple[list[int], int]:
    chosen, total = [], 0
    for i, length in enumerate(lengths):
        if total + length <= cap:
            chosen.append(i)
            total += length
    return chosen, total
