"""Inspection of a data file: a survey of its mistakes, and a profile of what it holds and what looks wrong.

Each is one pass over the lines and the headers of the images. Memory grows with the number of descriptions and images
(their paths), not with the objects.
"""

from __future__ import annotations

import filecmp
import json
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from stage2_api.coordinates import BINS
from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.files import open_regular
from stage2_trainer.data.image_oddities import oddities
from stage2_trainer.data.images import ImageError, file_path, read_header
from stage2_trainer.data.nearest_file import FilesBelow
from stage2_trainer.data.object_order import ObjectOrder, area_of
from stage2_trainer.data.records import MAX_REPORTED_PROBLEMS, Line, Record, RecordRules, is_missing, lines, no_records
from stage2_trainer.data.run_records import compared_sizes, size_problem
from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from stage2_trainer.matching.parse import Kind

Size = Literal["small", "medium", "large"]
Written = Literal["tokens", "bins", "pixels", "both", "none"]
Count = Callable[[Sequence[str]], Sequence[int]]  # A function from answers to their lengths

SMALL, MEDIUM = 32**2, 96**2  # COCO's limits, in square pixels
NAMED = 3
NAMED_IMAGES = 5
HEAD_BYTES = 4096
LONGEST_NAME = 200  # characters of an image's path or URL
MOST_CLASSES = 100_000
BATCH = 256
SHOWN = 12
SEED = 17

TWO_AT_ONE_PLACE = "two objects at one place"
NO_AREA = "an object without area"
ONE_BIN = "an object one bin wide or high"
MISSING_IMAGE = "an image that is missing"
BROKEN_IMAGE = "an image that cannot be read"
OTHER_SIZE = "an image of another size than its record says"
SAME_IMAGE = "an image that another record has, too"


@dataclass
class Survey:
    """The findings in the first lines of a data file.

    records: the number of correct ones. objects: theirs, by kind. missing: images that are not files, in the order of
    the data file, each once. nearest: the file that the first of them may mean. whole: whether the file was read to its
    end.
    """

    path: Path
    records: int = 0
    objects: Counter[Kind] = field(default_factory=Counter)
    broken: list[Problem] = field(default_factory=list)
    missing: dict[str, None] = field(default_factory=dict)
    nearest: str = ""
    whole: bool = True

    @property
    def problems(self) -> list[Problem]:
        """All that must be corrected: broken lines, then missing images, the first few by name."""
        if not self.missing:
            return self.broken
        rule = f"{len(self.missing)} {'images are' if len(self.missing) > 1 else 'image is'} missing"
        way_out = f"put them there, or correct the paths; they are relative to the JSONL file's folder{self.nearest}"
        return [*self.broken, Problem(f"{self.path} images", [*self.missing][:NAMED_IMAGES], rule, way_out)]


def survey(
    path: Path | str, rules: RecordRules, limit: int | None = None, on_line: Callable[[Line], None] | None = None
) -> Survey:
    """Check the first `limit` records of a JSONL file; `on_line` is called with each line.

    Raises ConfigError if the file cannot be read at all, or has the form of another tool.
    """
    found, lenient = Survey(Path(path)), rules.without_images()
    for line in lines(path):
        if limit is not None and line.position >= limit:
            found.whole = False
            break
        if on_line is not None:
            on_line(line)
        try:
            record = line.record(lenient)
        except ConfigError as error:
            found.broken += line.problems(error)
            continue
        if problems := _image_problems(f"{path}:{line.number}", record):
            found.broken += problems
        else:
            _add(found, record)
    if not found.records and not found.broken:
        found.broken.append(no_records(path))
    if found.missing:
        found.nearest = _nearest(FilesBelow(found.path.parent.absolute()), next(iter(found.missing)))
    return found


def _nearest(below: FilesBelow, image: str) -> str:
    """Return the file that may be meant by a missing one; empty if there is none."""
    near = below.nearest(Path(image))
    return f"; there is {near[0]}: {near[1]}" if near else ""


def _image_problems(where: str, record: Record) -> list[Problem]:
    """Return the problems of a record's images, by their headers: they cannot be read, or have another size.

    An image that is missing has none here: `missing` lists it.
    """
    problems, sizes = [], []
    for number, source in enumerate(record.images):
        if is_missing(source):
            return []
        try:
            sizes.append(read_header(source).size)
        except ImageError as error:
            rule = f"cannot be read: {error.fault}"
            problems.append(Problem(f"{where} images[{number}]", source, rule, error.way_out))
    stated = (record.width, record.height)
    if not problems and stated not in ((0, 0), *sizes):
        problems.append(size_problem(where, record, sizes[0]))
    return problems


def _add(found: Survey, record: Record) -> None:
    found.records += 1
    found.objects.update(one.kind for one in record.objects)
    found.missing.update(dict.fromkeys(filter(is_missing, record.images)))


@dataclass
class Lengths:
    """A distribution of lengths, and the longest by name."""

    counts: Counter[int] = field(default_factory=Counter)
    longest: list[tuple[int, str]] = field(default_factory=list)

    def add(self, length: int, name: str) -> None:
        """Count one."""
        self.counts[length] += 1
        if len(self.longest) < NAMED or length > self.longest[-1][0]:
            self.longest = sorted([*self.longest, (length, name)], key=lambda one: -one[0])[:NAMED]

    def quantile(self, share: float) -> int:
        """Return the length that this share does not exceed; 0 if there are none."""
        rest = share * self.counts.total()
        for length in sorted(self.counts):
            rest -= self.counts[length]
            if rest <= 0:
                return length
        return 0


@dataclass
class Suspicions:
    """What looks wrong: the count and the first few places of each reason."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, place: str) -> None:
        """Count one."""
        self.counts[reason] += 1
        named = self.places.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(place)


@dataclass
class Profile:
    """The content of a data file.

    broken: the number of lines that are not records. problems: of the first of them. written: records by the form of
    their coordinates. kinds, sizes, classes: objects. shown: some records whose images can be read.
    """

    path: Path
    records: int = 0
    broken: int = 0
    problems: list[Problem] = field(default_factory=list)
    written: Counter[Written] = field(default_factory=Counter)
    kinds: Counter[Kind] = field(default_factory=Counter)
    sizes: Counter[Size] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    further_classes: int = 0
    objects: Lengths = field(default_factory=Lengths)
    order: ObjectOrder = field(default_factory=ObjectOrder)
    answers: Lengths = field(default_factory=Lengths)
    suspicions: Suspicions = field(default_factory=Suspicions)
    shown: list[Record] = field(default_factory=list)

    @property
    def alike(self) -> list[list[str]]:
        """Groups of descriptions that differ only in case or spaces, the most frequent first."""
        groups: dict[str, list[str]] = {}
        for name, _ in self.classes.most_common():
            groups.setdefault(" ".join(name.casefold().split()), []).append(name)
        return [group for group in groups.values() if len(group) > 1]


def profile(
    path: Path, rules: RecordRules, lengths_of: Count, on_line: Callable[[Line], None] | None = None
) -> Profile:
    """Profile a whole data file; `on_line` is called with each line.

    Raises ConfigError if the file cannot be read at all, or has the form of another tool.
    """
    builder = _ProfileBuilder(Profile(path), rules.without_images(), lengths_of)
    for line in lines(path):
        if on_line is not None:
            on_line(line)
        builder.add(line)
    return builder.finish()


class _ProfileBuilder:
    """Builds a profile line by line."""

    def __init__(self, profile: Profile, rules: RecordRules, lengths_of: Count) -> None:
        self._profile = profile
        self._rules = rules
        self._lengths_of = lengths_of
        self._waiting: list[tuple[str, str]] = []
        self._same = SameImages()
        self._missing: set[str] = set()
        self._random = random.Random(SEED)
        self._candidates = 0

    def add(self, line: Line) -> None:
        """Add a line."""
        try:
            record = line.record(self._rules)
        except ConfigError as error:
            problems = line.problems(error)
            self._profile.broken += 1
            self._profile.problems += problems[: MAX_REPORTED_PROBLEMS - len(self._profile.problems)]
            return
        place = f"line {line.number}, {record.sample_id}"
        self._profile.records += 1
        self._profile.written[written(json.loads(line.text), self._rules)] += 1
        self._profile.objects.add(len(record.objects), place)
        self._profile.order.add(record)
        self._add_objects(record, place)
        self._add_answer(record, place)
        if self._add_images(record, place):
            self._sample(record)

    def finish(self) -> Profile:
        """Complete the profile and return it."""
        self._measure()
        self._profile.shown.sort(key=lambda record: record.index)
        if not self._profile.records and not self._profile.broken:
            self._profile.problems.append(no_records(self._profile.path))
        return self._profile

    def _add_objects(self, record: Record, place: str) -> None:
        profile, seen = self._profile, set()
        for one in record.objects:
            profile.kinds[one.kind] += 1
            profile.sizes[size_of(one, record)] += 1
            if one.desc in profile.classes or len(profile.classes) < MOST_CLASSES:
                profile.classes[one.desc] += 1
            else:
                profile.further_classes += 1
            if (reason := _flat(one)) is not None:
                profile.suspicions.add(reason, f"{place}: {one.desc}")
            if (one.kind, one.bins) in seen:
                profile.suspicions.add(TWO_AT_ONE_PLACE, f"{place}: {one.desc}")
            seen.add((one.kind, one.bins))

    def _add_answer(self, record: Record, place: str) -> None:
        self._waiting.append((serialize_objects(record.objects), place))
        if len(self._waiting) == BATCH:
            self._measure()

    def _measure(self) -> None:
        lengths = self._lengths_of([text for text, _ in self._waiting])
        for length, (_, place) in zip(lengths, self._waiting, strict=True):
            self._profile.answers.add(length, place)
        self._waiting = []

    def _add_images(self, record: Record, place: str) -> bool:
        """Check the headers of a record's images, and some pixels; return whether the record can be shown."""
        suspicions, sizes = self._profile.suspicions, []
        for source in record.images:
            if is_missing(source):
                if source not in self._missing:
                    suspicions.add(MISSING_IMAGE, self._missing_place(place, source))
                self._missing.add(source)
                continue
            if self._same.seen(source, record.index):
                suspicions.add(SAME_IMAGE, place)
            try:
                sizes.append(read_header(source).size)
            except ImageError as error:
                suspicions.add(f"{BROKEN_IMAGE}: {error.fault}; {error.way_out}", f"{place}: {source[:LONGEST_NAME]}")
            for reason in oddities(source):
                suspicions.add(reason, place)
        stated = (record.width, record.height)
        if len(sizes) == len(record.images) and stated not in sizes:
            suspicions.add(OTHER_SIZE, f"{place}: {compared_sizes(record, sizes[0])}")
        return stated in sizes[:1] and bool(record.objects)

    def _missing_place(self, place: str, source: str) -> str:
        """Return where a missing image is named, for the first few with the nearest file."""
        if len(self._missing) >= NAMED:
            return place
        return f"{place}: {source}{_nearest(self._below, source)}"

    @cached_property
    def _below(self) -> FilesBelow:
        """The files of the data file's folder, for the names of missing ones."""
        return FilesBelow(self._profile.path.parent.absolute())

    def _sample(self, record: Record) -> None:
        """Keep each record with equal probability (reservoir sampling)."""
        self._candidates += 1
        if len(self._profile.shown) < SHOWN:
            self._profile.shown.append(record)
        elif (place := self._random.randrange(self._candidates)) < SHOWN:
            self._profile.shown[place] = record


def written(raw: Mapping[str, Any], rules: RecordRules) -> Written:
    """Return the form of a record's coordinates, as read by these rules."""
    values = (one.get("bbox_2d") or one.get("poly") for one in raw["objects"])
    kinds = {_is_token(value) for value in values}
    if not kinds:
        return "none"
    if len(kinds) > 1:
        return "both"
    return "tokens" if kinds.pop() else raw.get("units") or rules.units or "none"


def size_of(one: GTObject, record: Record) -> Size:
    """Return COCO's size of an object, by the area of its box or polygon in pixels."""
    area = area_of(one) * record.width * record.height / BINS**2
    return "small" if area < SMALL else "medium" if area < MEDIUM else "large"


def _is_token(value: Any) -> bool:
    first = value[0]
    return isinstance(first[0] if isinstance(first, list) else first, str)


def _flat(one: GTObject) -> str | None:
    xs, ys = one.bins[::2], one.bins[1::2]
    if not area_of(one):
        return NO_AREA
    return ONE_BIN if min(max(xs) - min(xs), max(ys) - min(ys)) == 1 else None


class SameImages:
    """Finds repeated images. Of each it keeps a number, and compares whole files if these agree."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, str]] = {}

    def seen(self, source: str, position: int) -> bool:
        """Whether a record before this position has this image too."""
        try:
            first, other = self._first.setdefault(_key(source), (position, "" if _is_url(source) else source))
            if first == position:
                return False
            return _is_url(source) or source == other or filecmp.cmp(file_path(source), file_path(other), shallow=False)
        except OSError:
            return False  # gone or unreadable: the check of headers reports it


def _is_url(source: str) -> bool:
    return source.startswith("data:")


def _key(source: str) -> int:
    """Return a number that images of equal bytes share, and few others."""
    if _is_url(source):
        return hash(source)
    with open_regular(file_path(source)) as file:
        return hash((os.fstat(file.fileno()).st_size, zlib.crc32(file.read(HEAD_BYTES))))
