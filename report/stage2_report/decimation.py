"""Curves with so few points that a page stays small, and in which no peak is lost."""

from __future__ import annotations

import math
from itertools import pairwise

from stage2_report.run_history import Points

MOST_POINTS = 600


def decimated(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points: of each stretch of steps the lowest and the highest, and the first and last."""
    if len(points) <= most:
        return points
    kept = {0, len(points) - 1}
    for places in _stretches(len(points), (most - 2) // 2):
        finite = [place for place in places if math.isfinite(points[place][1])] or [places[0]]
        kept |= {min(finite, key=lambda place: points[place][1]), max(finite, key=lambda place: points[place][1])}
    return [points[place] for place in sorted(kept)]


def averaged(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most `most` points, each the mean of a stretch: for what is stacked, where peaks would not add up."""
    if len(points) <= most:
        return points
    means = []
    for places in _stretches(len(points), most):
        finite = [points[place][1] for place in places if math.isfinite(points[place][1])]
        means.append((points[places[-1]][0], sum(finite) / len(finite) if finite else math.nan))
    return means


def _stretches(count: int, parts: int) -> list[range]:
    ends = [round(count * part / parts) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(ends) if end > start]
