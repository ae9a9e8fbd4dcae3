"""An annotated image, in whatever format its annotations came, and what is left out of a data set and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from stage2_api.errors import ConfigError, Problem

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


def refused(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    """Return that a file cannot be imported, with the place in it."""
    return ConfigError([Problem(path, value, rule, way_out)])


Outline = Sequence[tuple[float, float]]
NAMED = 3
SAME_NAME = "a name that several categories have: in records they are one"


class LeftOut(Exception):
    """An image or an object is left out, for this reason."""


@dataclass(frozen=True)
class Outlines:
    """The outer outlines of an object's parts, and how many holes its parts have, for which an outline has no place.

    mask_size: width and height of the mask that they come from, which must be the image's; None of polygons.
    """

    parts: Sequence[Outline] = ()
    holes: int = 0
    mask_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class AnnotatedObject:
    """An object: its box (x1, y1, x2, y2) and the outlines of its parts, in pixels; no parts where only a box is.

    Pixels are counted from the image's edge: its left column lies between 0 and 1.
    """

    desc: str
    box: tuple[float, float, float, float]
    outlines: Outlines = Outlines()


@dataclass(frozen=True)
class AnnotatedImage:
    """An image with its objects. size: width and height that the annotations say; None where they say none.

    shares: coordinates are shares of width and height, not pixels. content: the encoded image where it lies inside the
    data set and has no file; `path` is then the name of the file that it is to have.
    """

    sample_id: str
    path: Path
    size: tuple[float, float] | None
    objects: Sequence[AnnotatedObject]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    shares: bool = False
    content: bytes | None = None


@dataclass
class Tally:
    """What was written, what was left out, and what was changed: by reason how many, and the first few by name."""

    records: int = 0
    objects: int = 0
    images_left_out: Counter[str] = field(default_factory=Counter)
    objects_left_out: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)

    def leave_out_image(self, reason: str, name: str) -> None:
        """Count an image that is not written."""
        self.images_left_out[reason] += 1
        self._name(reason, name)

    def leave_out_object(self, reason: str, name: str) -> None:
        """Count an object, or a part of one, that is not written."""
        self.objects_left_out[reason] += 1
        self._name(reason, name)

    def change(self, rule: str, name: str) -> None:
        """Count what is written otherwise than it stands in the annotations, or by a rule that a person should know."""
        self.changed[rule] += 1
        self._name(rule, name)

    def _name(self, reason: str, name: str) -> None:
        named = self.names.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(name)


@dataclass(frozen=True)
class AnnotatedSet:
    """The images of a data set, read one by one, and how many there are."""

    total: int
    images: Iterable[AnnotatedImage]

    def __iter__(self) -> Iterator[AnnotatedImage]:
        return iter(self.images)


def count_same_names(names: Iterable[str], tally: Tally) -> None:
    """Count the names that several categories have: in records they are one."""
    for name, count in Counter(names).items():
        if count > 1:
            tally.change(SAME_NAME, name)
