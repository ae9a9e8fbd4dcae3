"""The one model of an annotated image that all readers share, and what is left out of a data set and why.

A reader yields annotated images; `record_writer` makes records of them. Both count in a Tally, by
reason, what they skip or change.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

from stage2_api.errors import shortened
from stage2_trainer.data.files import name_below

Box = tuple[float, float, float, float]
Outline = Sequence[tuple[float, float]]
Units = Literal["pixels", "shares"]  # of coordinates: pixels of the image, or shares of its width and height

IMAGE_ENDINGS = frozenset({
    ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo", ".pbm", ".pgm", ".png",
    ".pnm", ".ppm", ".tif", ".tiff", ".webp", ".heic", ".heif", ".jxl",
})  # fmt: skip
"""Endings of images' names; images of the last three are left out, with that reason."""
INFINITE = 1e100
EXACT = 2**53  # from here on, floats skip whole numbers
WHOLE = re.compile(r"[+-]?[0-9]{1,40}(\.0*)?")
ROUNDED = 1e-3  # rounding moves shares this far outside 0..1
REACH = 0.5  # a box may reach out of its image: pixels of one that does, in shares, lie this far outside 0..1
SURROGATE = re.compile("[\ud800-\udfff]")
NAMED = 3  # examples of a reason
LONGEST_DETAIL = 60

CROWD = "it is a crowd, not an object (iscrowd)"
BROKEN_BOX = "its box is not four numbers"
FIVE_NUMBERS = (
    "its box has five numbers, as a rotated one has, and nothing says what they mean: write four, with the degrees "
    "clockwise as rotation"
)
ROUNDED_ID = "its id is a float from 2^53 on, which may have been rounded: write whole numbers, or texts"
BROKEN_OUTLINE = "its segmentation cannot be read"
OTHER_MASK = "its segmentation is a mask of another size than its image"
SHARES = (
    "its coordinates all lie in 0 to 1, or little beyond: they are shares of the image, not pixels (--units shares)"
)
NOT_SHARES = (
    "its numbers are not shares of the image, 0 to 1 (--units pixels, if they are pixels; divide percent by 100)"
)
KEYPOINTS = "keypoints are not written, only the box"
NO_CATEGORY = "its category is not in the file"
SAME_NAME = "several categories have this name: in records they are one"


class LeftOut(Exception):
    """An image or an object is left out, for this reason. detail: what stands there instead, for the example."""

    def __init__(self, reason: str, *details: object) -> None:
        super().__init__(reason)
        shown = (text if isinstance(text, str) else shortened(text, LONGEST_DETAIL) for text in details)
        self.detail = "".join(f": {text}" for text in shown)


@dataclass(frozen=True)
class Outlines:
    """The outer outlines of an object's parts, and the number of their holes, which outlines cannot show.

    mask_size: width and height of the mask that they come from, which must be the image's; None for polygons. runs: its
    run lengths, if it is not drawn yet, which costs as much as its size. bounds: the box around all parts of a mask;
    None where it is empty.
    """

    parts: Sequence[Outline] = ()
    holes: int = 0
    mask_size: tuple[int, int] | None = None
    runs: Sequence[int] | None = None
    bounds: Box | None = None


@dataclass(frozen=True)
class AnnotatedObject:
    """An object: its box (x1, y1, x2, y2) and the outlines of its parts, in pixels; no parts where there is only a box.

    Pixels count from the image's edge: its left column lies between 0 and 1. noted: rules by which it differs from its
    annotation, which are counted if it is written.
    """

    desc: str
    box: Box
    outlines: Outlines = Outlines()
    noted: Sequence[str] = ()


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
    """What was written, left out and changed: a count for each reason, and the first few names, each once.

    unnamed: reasons that have more names. without_objects: images whose annotations have none. outside: folders of
    images that are not below the data file's. missing: the first few paths without a file, each once, and the folder in
    which it must lie.
    """

    records: int = 0
    objects: int = 0
    without_objects: int = 0
    images_left_out: Counter[str] = field(default_factory=Counter)
    objects_left_out: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    names: dict[str, list[str]] = field(default_factory=dict)
    unnamed: set[str] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    missing: dict[Path, Path] = field(default_factory=dict)

    def leave_out_image(self, why: LeftOut | str, name: str) -> None:
        """Count an image that is not written."""
        self._count(self.images_left_out, why, name)

    def leave_out_object(self, why: LeftOut | str, name: str) -> None:
        """Count an object, or a part of one, that is not written."""
        self._count(self.objects_left_out, why, name)

    def leave_out_missing(self, why: LeftOut | str, path: Path, root: Path) -> None:
        """Count an image whose file is missing, under this path."""
        self.leave_out_image(why, name_below(path, root))
        if len(self.missing) < NAMED:
            self.missing[path] = root

    def change(self, rule: str, name: str) -> None:
        """Count something that is written differently from the annotations, or by a rule that a person should know."""
        self._count(self.changed, rule, name)

    def _count(self, counts: Counter[str], why: LeftOut | str, name: str) -> None:
        reason, detail = str(why), why.detail if isinstance(why, LeftOut) else ""
        counts[reason] += 1
        named, example = self.names.setdefault(reason, []), f"{name}{detail}"
        if example in named:
            return
        if len(named) < NAMED:
            named.append(example)
        else:
            self.unnamed.add(reason)


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
    if not isinstance(value, list | tuple) or len(value) not in (4, 5) or not all(map(is_number, value)):
        raise LeftOut(BROKEN_BOX, value)
    if len(value) == 5:
        raise LeftOut(FIVE_NUMBERS, value)
    first, second, third, fourth = value
    return first, second, third, fourth


def all_shares(numbers: Iterable[float], outside: float = ROUNDED) -> bool:
    """Whether numbers can be shares of an image: all lie in 0 to 1, or at most this far outside."""
    return all(-outside <= number <= 1 + outside for number in numbers)


def stated_size(width: Any, height: Any) -> tuple[float, float] | None:
    """Return the size in annotations, as numbers or as their text (640, 640.0, "640").

    None where there is none: some tools write 0 or -1 where they do not know it.
    """
    try:
        sides = (float(width), float(height))
    except (TypeError, ValueError, OverflowError):
        return None
    return sides if all(map(is_number, sides)) and min(sides) > 0 else None


def as_id(value: Any) -> int | str | None:
    """Return a value as an id: a whole number (1.0 is 1), or a text.

    None for any other value: for true, which equals 1 in Python, and for a float so large that it may be rounded.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < EXACT else None
    return value if (isinstance(value, int) and not isinstance(value, bool)) or is_text(value) else None


class KnownIds:
    """The ids of a list, found by other spellings too: 17, 17.0, "17", "017" and "17.0" are the same number.

    Where several ids of the list are the same number, each is found by its own spelling alone.
    """

    def __init__(self, ids: Iterable[int | str]) -> None:
        self._ids = frozenset(ids)
        self._by_number: dict[int | str, list[int | str]] = defaultdict(list)
        for known in self._ids:
            self._by_number[_as_number(known)].append(known)

    def find(self, value: Any) -> int | str | None:
        """Return the id of the list that a value is; None if it is none. Raises LeftOut if it may be rounded."""
        if isinstance(value, float) and abs(value) >= EXACT:
            raise LeftOut(ROUNDED_ID, value)
        if (number := as_id(value)) is None or number in self._ids:
            return number
        same = self._by_number.get(_as_number(number), [])
        return same[0] if len(same) == 1 else None


def _as_number(known: int | str) -> int | str:
    """Return the number that a text writes in decimal digits, or else the id itself."""
    if isinstance(known, int) or not WHOLE.fullmatch(known.strip()):
        return known
    return int(known.strip().partition(".")[0])
