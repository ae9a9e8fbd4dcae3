"""The one model of an annotated image that all readers share, and what is left out of a data set and why.

A reader yields annotated images; `record_writer` makes records of them. Both count in a Tally whatever is left out or
changed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

Box = tuple[float, float, float, float]
Outline = Sequence[tuple[float, float]]

IMAGE_ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})
INFINITE = 1e100
SURROGATE = re.compile("[\ud800-\udfff]")
NAMED = 3  # examples of a reason

CROWD = "it is a crowd, not an object (iscrowd)"
BROKEN_BOX = "its box is not four numbers"
BROKEN_OUTLINE = "its segmentation cannot be read"
OTHER_MASK = "its segmentation is a mask of another size than its image"
KEYPOINTS = "keypoints are not written, only the box"
NO_CATEGORY = "its category is not in the file"
SAME_NAME = "several categories have this name: in records they are one"


class LeftOut(Exception):
    """An image or an object is left out, for this reason."""


@dataclass(frozen=True)
class Outlines:
    """The outer outlines of an object's parts, and the number of their holes, which outlines cannot show.

    mask_size: width and height of the mask that they come from, which must be the image's; None for polygons.
    """

    parts: Sequence[Outline] = ()
    holes: int = 0
    mask_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class AnnotatedObject:
    """An object: its box (x1, y1, x2, y2) and the outlines of its parts, in pixels; no parts where there is only a box.

    Pixels count from the image's edge: its left column lies between 0 and 1.
    """

    desc: str
    box: Box
    outlines: Outlines = Outlines()


@dataclass(frozen=True)
class AnnotatedImage:
    """An image with its objects. size: width and height in the annotations; None where they have none.

    shares: coordinates are shares of width and height, not pixels. content: the encoded image, if it lies inside the
    data set and has no file; `path` is then the name of its future file. root: the folder in which a file must lie.
    """

    sample_id: str
    path: Path
    size: tuple[float, float] | None
    objects: Sequence[AnnotatedObject]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    content: bytes | None = None
    root: Path = Path()


@dataclass(frozen=True)
class AnnotatedSet:
    """The images of a data set, read one by one, and their number."""

    total: int
    images: Iterable[AnnotatedImage]

    def __iter__(self) -> Iterator[AnnotatedImage]:
        return iter(self.images)


@dataclass
class Tally:
    """What was written, left out and changed: a count for each reason, and the first few names.

    outside: folders of images that are not below the data file's. missing: the first few paths without a file, and the
    folder of each.
    """

    records: int = 0
    objects: int = 0
    images_left_out: Counter[str] = field(default_factory=Counter)
    objects_left_out: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)
    missing: list[tuple[Path, Path]] = field(default_factory=list)

    def leave_out_image(self, reason: str, name: str) -> None:
        """Count an image that is not written."""
        self._count(self.images_left_out, reason, name)

    def leave_out_object(self, reason: str, name: str) -> None:
        """Count an object, or a part of one, that is not written."""
        self._count(self.objects_left_out, reason, name)

    def change(self, rule: str, name: str) -> None:
        """Count something that is written differently from the annotations, or by a rule that a person should know."""
        self._count(self.changed, rule, name)

    def _count(self, counts: Counter[str], reason: str, name: str) -> None:
        counts[reason] += 1
        named = self.names.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(name)


def count_same_names(names: Iterable[str], tally: Tally) -> None:
    """Count the names that several categories have: in records they are one."""
    for name, count in Counter(names).items():
        if count > 1:
            tally.change(SAME_NAME, name)


def is_crowd(flag: Any) -> bool:
    """Whether COCO's `iscrowd` is set, as a number, a truth value or the text of one."""
    return str(flag if flag is not None else "").strip().lower() not in ("", "0", "0.0", "false")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number, so that areas can be computed."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < INFINITE


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a text that a file can hold: half of a surrogate pair cannot be written."""
    return isinstance(value, str) and not SURROGATE.search(value)


def four_numbers(value: Any) -> Box:
    """Return a box's numbers. Raises LeftOut."""
    if not isinstance(value, list | tuple) or len(value) != 4 or not all(map(is_number, value)):
        raise LeftOut(BROKEN_BOX)
    first, second, third, fourth = value
    return first, second, third, fourth


def stated_size(width: Any, height: Any) -> tuple[float, float] | None:
    """Return the size in annotations, as numbers or as their text (640, 640.0, "640"); None where there is none."""
    try:
        sides = (float(width), float(height))
    except (TypeError, ValueError, OverflowError):
        return None
    return sides if all(map(is_number, sides)) else None
