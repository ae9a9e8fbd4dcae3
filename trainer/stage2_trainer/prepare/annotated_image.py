"""An annotated image, in whatever format its annotations came, and what is left out of a data set and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
