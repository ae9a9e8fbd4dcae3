"""Exact subset sums: which segments fill a room best, the fewest of them, and of those the ones that waited longest.

Two ways find the same. Where few segments fill the room, sets of sums are integers: bit r says that r tokens are still
missing after some j of the segments, and only those r are kept which the other segments can make up for. Where many
are needed, a dynamic programme counts how few segments make each sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.unsignedinteger]

_BLOCK = 32
_MOST_LAYERED = 5000  # segments times layers, up to which the integers are the quicker way


def longest_subset(lengths: list[int], room: int, *, more_than: int) -> list[int]:
    """Return the indices of the subset with the greatest sum <= room, then fewest members, then smallest index tuple.

    Empty when no sum is greater than `more_than`.
    """
    total = greatest_sum(lengths, room)
    if total <= more_than:
        return []
    few = subset_of_few(lengths, total, effort=_MOST_LAYERED)
    return few if few is not None else subset_of_many(lengths, total)


def greatest_sum(lengths: list[int], room: int) -> int:
    """Return the greatest sum <= room that any subset has."""
    left = 1 << room  # bit r: some subset leaves r; a longer one falls out
    for length in lengths:
        left |= left >> length
        if left & 1:
            return room
    return room - ((left & -left).bit_length() - 1)


def subset_of_few(lengths: list[int], total: int, *, effort: int) -> list[int] | None:
    """Return the smallest index tuple among the sets with the fewest items that sum to `total`, which some set does.

    None when the search for it is more work than `effort`, in segments times layers.
    """
    longest = sorted(lengths, reverse=True)
    most = [0, *accumulate(longest)]
    least = [0, *accumulate(longest[::-1])]
    for count in range(next(k for k, reached in enumerate(most) if reached >= total), len(most)):
        shortest, longest_of = total - most[count - 1], total - least[count - 1]
        usable = [i for i, length in enumerate(lengths) if shortest <= length <= longest_of]
        if len(usable) * (count - 1) > effort:
            return None
        if len(usable) >= count and (chosen := _Layers([lengths[i] for i in usable], total, count).first()):
            return [usable[k] for k in chosen]
    raise AssertionError(f"no subset sums to {total}")


def subset_of_many(lengths: list[int], total: int) -> list[int]:
    """Return the same, whatever the number of members: by rows from the last item to the first.

    Row i counts the fewest of the items i.. that make each sum. Only every 32nd row is kept, the others are computed
    again where needed.
    """
    rows = _Rows(lengths, total, np.uint8)
    if not rows.reach(total):  # more than 254 items are needed
        rows = _Rows(lengths, total, np.uint32)
    return rows.trace(total)


@dataclass(frozen=True)
class _Layer:
    """The tokens that `count` of the segments i.. leave missing: bit r of `missing[i]` stands for `least` + r."""

    least: int
    missing: list[int]

    def has(self, i: int, missing: int) -> bool:
        return missing >= self.least and bool(self.missing[i] >> (missing - self.least) & 1)


class _Layers:
    """Sets of exactly `count` segments that sum to `total`; layer j is of those with j members."""

    def __init__(self, lengths: list[int], total: int, count: int) -> None:
        self._lengths = lengths
        self._total = total
        self._count = count
        self._shortest = [0, *accumulate(sorted(lengths))]
        self._longest = [0, *accumulate(sorted(lengths, reverse=True))]

    def first(self) -> list[int]:
        """Return the smallest index tuple; empty if there is none."""
        if not self._shortest[self._count] <= self._total <= self._longest[self._count]:
            return []
        layers = [_Layer(self._total, [1] * (len(self._lengths) + 1))]
        while len(layers) < self._count:
            layers.append(self._with_one_more(layers[-1], len(layers)))
        chosen: list[int] = []
        reached = 0
        for i, length in enumerate(self._lengths):
            if layers[-1].has(i + 1, reached + length):
                chosen.append(i)
                reached += length
                layers.pop()
                if not layers:
                    break
        return chosen

    def _with_one_more(self, layer: _Layer, members: int) -> _Layer:
        """Return the layer of `members`, whose missing tokens the other segments can make up for."""
        others = self._count - members
        least = max(self._shortest[others], self._total - self._longest[members])
        most = min(self._longest[others], self._total - self._shortest[members])
        within = (2 << most - least) - 1 if most >= least else 0
        shift = least - layer.least
        found = 0
        missing = [0] * len(layer.missing)
        for i in range(len(self._lengths) - 1, -1, -1):
            by = self._lengths[i] + shift
            one_more = layer.missing[i + 1]
            found |= (one_more >> by if by >= 0 else one_more << -by) & within
            missing[i] = found
        return _Layer(least, missing)


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

    def reach(self, total: int) -> bool:
        return bool(self._kept[0][total] < self._unreachable)

    def trace(self, total: int) -> list[int]:
        """Return the smallest index tuple among the sets with the fewest items that sum to `total`."""
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
        """Return each item of a block with the row of the items after it."""
        end = min(start + _BLOCK, len(self._lengths))
        counts = self._kept[end].copy()
        for i in range(end - 1, start - 1, -1):
            self._after[i - start] = counts
            self._add(counts, self._lengths[i])
        return [(i, self._after[i - start]) for i in range(start, end)]
