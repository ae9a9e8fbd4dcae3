"""The box and the outline of an object, from whichever of the two its annotation has, rotated where it says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from stage2_trainer.prepare.annotations import AnnotatedObject, Box, LeftOut, Outline, Outlines, four_numbers, is_number
from stage2_trainer.prepare.outlines import outlines_of

NO_SHAPE = "it has neither a box nor an outline"
FROM_OUTLINE = "an object without a box, or with one that has no area, has the bounds of its outline"
ROTATED = "a rotated box was replaced by its bounds, or with --geometry poly by its outline"
ELLIPSE_POINTS = 64
LARGEST_RADIANS = 7.0  # a whole turn, rounded up
UNCLEAR_ANGLE = (
    "its box has an angle that may be degrees or radians: write the degrees clockwise as rotation, or numbers above 7"
)
ROTATED_SHARES = "its box is rotated, and its coordinates are shares, of which a rotation has no angle"


def shaped_object(
    desc: str,
    annotation: Mapping[str, Any],
    box: Any,
    corners: Callable[[Box], Box],
    *,
    outlines: bool,
    shares: bool = False,
) -> AnnotatedObject:
    """Return the object of an annotation with `segmentation`, `rotation` and `angle` as in COCO, and this box.

    corners: turns the box's four numbers into x1, y1, x2, y2. outlines: the segmentation is read also where there is a
    box. Raises LeftOut.
    """
    segmentation = annotation.get("segmentation")
    stated = _usable(box, corners) if segmentation else _stated(box, corners)
    if stated is None:
        parts = outlines_of(segmentation)
        if not parts.parts and parts.bounds is None:
            raise LeftOut(NO_SHAPE)
        return AnnotatedObject(desc, bounds(parts), parts, (FROM_OUTLINE,))
    x1, y1, x2, y2 = stated
    parts = outlines_of(segmentation) if outlines else Outlines()
    if not (degrees := _rotation(annotation)) % 180:
        return AnnotatedObject(desc, (x1, y1, x2, y2), parts)
    if shares:
        raise LeftOut(ROTATED_SHARES)
    return rotated_object(desc, (x1, y1, x2, y2), math.radians(degrees), parts)


def rotated_object(desc: str, box: Box, angle: float, outlines: Outlines) -> AnnotatedObject:
    """Return the object of a box that is rotated clockwise about its centre, by an angle in radians.

    Its outline is the rotated box, unless there are others.
    """
    x1, y1, x2, y2 = box
    x, y, right, down = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) / 2, (y2 - y1) / 2
    cos, sin = math.cos(angle), math.sin(angle)
    corners: Outline = [
        (x + cos * along - sin * across, y + sin * along + cos * across)
        for along, across in ((-right, -down), (right, -down), (right, down), (-right, down))
    ]
    outline = Outlines([corners])
    has_own = bool(outlines.parts) or outlines.bounds is not None
    return AnnotatedObject(desc, bounds(outline), outlines if has_own else outline, (ROTATED,))


def ellipse(x: float, y: float, across: float, down: float, angle: float) -> tuple[Box, Outlines]:
    """Return the box and the outline of an ellipse by its centre, its two radii, and its turn clockwise in radians."""
    cos, sin = math.cos(angle), math.sin(angle)
    width, height = math.hypot(across * cos, down * sin), math.hypot(across * sin, down * cos)
    turns = (2 * math.pi * number / ELLIPSE_POINTS for number in range(ELLIPSE_POINTS))
    points = [(across * math.cos(turn), down * math.sin(turn)) for turn in turns]
    outline = [(x + cos * right - sin * below, y + sin * right + cos * below) for right, below in points]
    return (x - width, y - height, x + width, y + height), Outlines([outline])


def bounds(outlines: Outlines) -> Box:
    """Return the smallest box around all parts."""
    if outlines.bounds is not None:
        return outlines.bounds
    xs, ys = zip(*(point for part in outlines.parts for point in part), strict=True)
    return min(xs), min(ys), max(xs), max(ys)


def _stated(box: Any, corners: Callable[[Box], Box]) -> Box:
    """Return the corners of a box. Raises LeftOut."""
    if box is None or box == []:
        raise LeftOut(NO_SHAPE)
    return corners(four_numbers(box))


def _usable(box: Any, corners: Callable[[Box], Box]) -> Box | None:
    """Return the corners of a box beside an outline; None if that must give the box.

    Some tools write zeros, -1, NaN, a blank text or a point where they have no box. A negative size stays: it is an
    error of reading.
    """
    try:
        numbers = four_numbers(box)
    except LeftOut:
        return None
    if {*numbers} in ({0}, {-1}):
        return None
    x1, y1, x2, y2 = corners(numbers)
    return None if x1 == x2 or y1 == y2 else (x1, y1, x2, y2)


def _rotation(annotation: Mapping[str, Any]) -> float:
    """Return the degrees by which a box is rotated clockwise: `rotation`, as CVAT writes it, or `angle`.

    Both are keys of the annotation or attributes. Raises LeftOut for an angle that may be radians.
    """
    attributes = annotation.get("attributes")
    places = (attributes if isinstance(attributes, Mapping) else {}, annotation)
    if rotation := next(filter(None, (_degrees(place.get("rotation")) for place in places)), 0.0):
        return rotation
    angle = next(filter(None, (_degrees(place.get("angle")) for place in places)), 0.0)
    if 0 < abs(angle) <= LARGEST_RADIANS:
        raise LeftOut(UNCLEAR_ANGLE, angle)
    return angle


def _degrees(value: Any) -> float:
    """Return a number, also one that is written as text; 0 for anything else."""
    try:
        degrees = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return degrees if is_number(degrees) else 0.0
