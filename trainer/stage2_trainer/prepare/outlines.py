"""Outlines of objects: from COCO's polygons and run-length masks, and to fewer points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from contourpy import contour_generator

from stage2_trainer.data.images import MOST_PIXELS
from stage2_trainer.data.run_lengths import run_lengths
from stage2_trainer.prepare.annotations import BROKEN_OUTLINE, Box, LeftOut, Outline, Outlines, is_number

Points = npt.NDArray[np.float64]
LEVEL = 0.5 - 1e-9  # the mean of four pixels of which two touch at a corner is above it


MOST_POINTS = 2000  # of an outline; each costs a pass over a part of the points that were given
TOO_MANY_POINTS = f"its outline has more than {MOST_POINTS:,} points that cannot be left out"


def outlines_of(segmentation: Any) -> Outlines:
    """Return the outlines of COCO's polygons, or its run-length mask, not drawn yet; none of None. Raises LeftOut."""
    try:
        if isinstance(segmentation, dict):
            height, width = segmentation["size"]
            _check_mask_size(height, width)
            runs = run_lengths(segmentation["counts"], height * width)
            return Outlines(mask_size=(width, height), runs=runs, bounds=_bounds_of_runs(runs, height))
        parts = segmentation or []
        if all(map(is_number, parts)):
            parts = [parts]  # one polygon, without the list of parts
        return Outlines([_polygon(flat) for flat in parts if flat])
    except (ValueError, TypeError, KeyError) as error:
        raise LeftOut(BROKEN_OUTLINE) from error


def drawn(outlines: Outlines) -> Outlines:
    """Return outlines with the parts of their mask, if that has not been drawn yet."""
    if outlines.runs is None or outlines.mask_size is None:
        return outlines
    width, height = outlines.mask_size
    found = outlines_of_mask(mask_of_runs(outlines.runs, height, width))
    return replace(found, mask_size=outlines.mask_size, bounds=outlines.bounds)


def _check_mask_size(height: Any, width: Any) -> None:
    """Raise ValueError for what is no size of an image that is read."""
    if not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in (height, width)):
        raise ValueError(f"the size {[height, width]}")
    if height * width > MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels")


def _bounds_of_runs(runs: Sequence[int], height: int) -> Box | None:
    """Return the box of a mask's pixels by its run lengths; None where it is empty."""
    ends = [*accumulate(runs)]
    columns: list[int] = []
    rows: list[int] = []
    for first, after in zip(ends[::2], ends[1::2], strict=False):  # background first
        if first == after:
            continue
        left, right = first // height, (after - 1) // height
        columns += (left, right)
        rows += (first % height, (after - 1) % height) if left == right else (0, height - 1)
    return (min(columns), min(rows), max(columns) + 1, max(rows) + 1) if columns else None


def _polygon(flat: Any) -> Outline:
    if len(flat) < 6 or len(flat) % 2 or not all(map(is_number, flat)):
        raise ValueError("a polygon is a list of at least three points, x and y in turn")
    return list(zip(flat[::2], flat[1::2], strict=True))


def area(outline: Outline) -> float:
    """Return the area of a polygon, by the shoelace formula."""
    return abs(_signed_area(np.asarray(outline, dtype=np.float64)))


def outlines_of_mask(mask: npt.NDArray[np.bool_]) -> Outlines:
    """Return the outlines of a mask's parts, half-way between its pixels and their neighbours.

    Pixels that touch at a corner belong to one part.
    """
    padded = np.pad(mask.astype(np.float64), 1)
    lines: Any = contour_generator(z=padded).lines(LEVEL)
    outlines = [np.round(2 * np.asarray(line[:-1])) / 2 - 0.5 for line in lines]
    outer = [outline for outline in outlines if _signed_area(outline) > 0]  # what is higher lies on a line's left
    return Outlines([[(float(x), float(y)) for x, y in one] for one in outer], len(outlines) - len(outer))


def mask_of_runs(counts: str | bytes | Sequence[int], height: int, width: int) -> npt.NDArray[np.bool_]:
    """Return the mask (height, width) of COCO's run lengths: column by column, background first.

    counts: a list, or COCO's compressed string. Raises ValueError where they do not cover the mask.
    """
    _check_mask_size(height, width)
    runs = run_lengths(counts, height * width)
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(width, height).T


def simplified(points: Points, tolerance: float) -> Points:
    """Return fewer points (N, 2) of a closed outline; all others are within `tolerance` of it.

    Douglas and Peucker, 1973, on the two halves between the first point and the one that is furthest from it. Raises
    LeftOut for more than MOST_POINTS.
    """
    far = int(np.argmax(np.hypot(*(points - points[0]).T)))
    closed = np.vstack([points, points[:1]])
    kept = {0, far, len(points)}
    pending = [(0, far), (far, len(points))]
    while pending:
        first, last = pending.pop()
        if last - first < 2:
            continue
        distances = _distances(closed[first + 1 : last], closed[first], closed[last])
        furthest = int(np.argmax(distances))
        if distances[furthest] > tolerance:
            middle = first + 1 + furthest
            kept.add(middle)
            if len(kept) > MOST_POINTS:
                raise LeftOut(TOO_MANY_POINTS)
            pending += [(first, middle), (middle, last)]
    return closed[sorted(kept - {len(points)})]


def without_repeats(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the points of a closed outline without consecutive duplicates."""
    closed = [points[-1], *points] if points else []
    return [after for before, after in pairwise(closed) if after != before]


def _signed_area(points: Points) -> float:
    x, y = points[:, 0], points[:, 1]
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _distances(points: Points, start: Points, end: Points) -> npt.NDArray[np.float64]:
    along = end - start
    length = float(along @ along)
    share = np.clip((points - start) @ along / length, 0.0, 1.0) if length else np.zeros(len(points))
    found: npt.NDArray[np.float64] = np.hypot(*(points - start - share[:, None] * along).T)
    return found
