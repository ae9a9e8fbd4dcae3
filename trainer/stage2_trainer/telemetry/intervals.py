"""Arithmetic of time intervals: their union, what of them lies within others, and the innermost of nested ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

Named = tuple[str, float, float]
"""A name, and the interval that has it."""


def seconds(intervals: Iterable[Interval]) -> float:
    """Return the sum of their lengths."""
    return sum(end - start for start, end in intervals)


def clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Return what of each lies in the window, without empty ones."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the disjoint intervals, in order, that cover the same time."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def divided(intervals: Iterable[Interval], by: Sequence[Interval]) -> tuple[list[Interval], list[Interval]]:
    """Return what lies within `by` and what does not; the intervals of `by` are disjoint and in order."""
    inside: list[Interval] = []
    outside: list[Interval] = []
    for start, end in intervals:
        for common in clipped(by, (start, end)):
            outside.append((start, common[0]))
            inside.append(common)
            start = common[1]
        outside.append((start, end))
    return inside, [(start, end) for start, end in outside if start < end]


def innermost(spans: Iterable[Named], window: Interval, *, rest: str) -> list[Named]:
    """Return the window cut into pieces, each with the name of the innermost span over it, or with `rest`.

    Spans of one thread, so that each lies within another or beside it.
    """
    pieces: list[Named] = []
    open_ones: list[Named] = []
    at = window[0]

    def until(end: float) -> None:
        nonlocal at
        if end > at:
            pieces.append((open_ones[-1][0] if open_ones else rest, at, end))
            at = end

    def close(before: float) -> None:
        while open_ones and open_ones[-1][2] <= before:
            until(open_ones[-1][2])
            open_ones.pop()

    inside = [(name, *cut) for name, *times in spans for cut in clipped([(times[0], times[1])], window)]
    for span in sorted(inside, key=lambda one: (one[1], -one[2])):
        close(before=span[1])
        until(span[1])
        open_ones.append(span)
    close(before=window[1])
    until(window[1])
    return pieces
