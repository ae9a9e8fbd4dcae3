"""What annotations of all formats hold: numbers, boxes, segmentations; and why an object is left out for them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, TypeGuard

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.prepare.annotated_image import LeftOut, Outline, Outlines
from stage2_trainer.prepare.outline import mask_of_runs, of_mask

Box = tuple[float, float, float, float]

IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
INFINITE = 1e100
SURROGATE = re.compile("[\ud800-\udfff]")

CROWD = "it is a crowd, not an object (iscrowd)"
BROKEN_BOX = "its box is not four numbers"
BROKEN_OUTLINE = "its segmentation cannot be read"
OTHER_MASK = "its segmentation is a mask of another size than its image"
KEYPOINTS = "keypoints are not written, only the box"
NO_CATEGORY = "its category is not in the file"


def is_crowd(flag: Any) -> bool:
    """Whether COCO's `iscrowd` says so, as a number, a truth value or the text of one."""
    return str(flag if flag is not None else "").strip().lower() not in ("", "0", "0.0", "false")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, of which an area can be computed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < INFINITE


def number_of(value: Any) -> float:
    """Return the number that a value is or spells; Python takes 1_0 for 10, which no tool writes. Raises ValueError."""
    if isinstance(value, str) and "_" in value:
        raise ValueError(f"no number: {value}")
    return float(value)


def four_numbers(value: Any) -> Box:
    """Return a box's numbers. Raises LeftOut."""
    if not isinstance(value, list | tuple) or len(value) != 4 or not all(map(is_number, value)):
        raise LeftOut(BROKEN_BOX)
    first, second, third, fourth = value
    return first, second, third, fourth


def said_size(width: Any, height: Any) -> tuple[float, float] | None:
    """Return the size that annotations say, as numbers or as their text (640, 640.0, "640"); None where they do not."""
    try:
        found = [number_of(side) for side in (width, height)]
    except (TypeError, ValueError, OverflowError):
        return None
    return (found[0], found[1]) if all(map(is_number, found)) else None


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a text that a file can hold: half of a surrogate pair cannot be written."""
    return isinstance(value, str) and not SURROGATE.search(value)


def outlines_of(segmentation: Any) -> Outlines:
    """Return the outlines of COCO's polygons, or of its run-length mask; none of None. Raises LeftOut."""
    try:
        if isinstance(segmentation, dict):
            height, width = segmentation["size"]
            mask = mask_of_runs(segmentation["counts"], height, width)
            return replace(of_mask(mask), mask_size=(width, height))
        return Outlines([_polygon(flat) for flat in segmentation or ()])
    except (ValueError, TypeError, KeyError) as error:
        raise LeftOut(BROKEN_OUTLINE) from error


def refused(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    """Return that a file cannot be imported, with the place in it."""
    return ConfigError([Problem(path, value, rule, way_out)])


def _polygon(flat: Any) -> Outline:
    if len(flat) < 6 or len(flat) % 2 or not all(map(is_number, flat)):
        raise ValueError("a polygon is a list of at least three points, x and y in turn")
    return list(zip(flat[::2], flat[1::2], strict=True))
