"""JSONL records: the one reader of data files.

A line is a record (semantics, section 2): `images`, `objects`, `width`, `height`, optional `units`, `summary` and
`metadata`. Every mistake in the file is reported with its line and field, before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from stage2_api.errors import ConfigError, Problem, refused
from stage2_trainer.data.files import leads_inside
from stage2_trainer.data.record_forms import OtherFormError, check_form, opened_document, other_document
from stage2_trainer.matching.ground_truth import (
    GroundTruth,
    GTObject,
    InvalidObject,
    Measure,
    Unit,
    read_object,
    serialize_objects,
)

MAX_REPORTED_PROBLEMS = 20
OTHER_NAMES = ("label", "name", "category", "class", "ref")
"""Keys under which other tools write what an object is."""
LONGEST_SIDE = 2**31 - 1
"""Pixels of an image's side, the most that a PNG can have; areas of much longer ones overflow floats."""


@dataclass(frozen=True)
class Record:
    """One image (or several) with its ground truth.

    objects: their coordinates are bins 0..999, x and y in turn. images: absolute paths or `data:` URLs. index: position
    in the file, from 0. width, height: pixels, 0 where they are not read.
    """

    index: int
    sample_id: str
    images: tuple[str, ...]
    width: int
    height: int
    objects: tuple[GTObject, ...] = ()
    summary: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ground_truth(self) -> GroundTruth:
        """The ground truth to which an answer is matched."""
        return GroundTruth(self.objects)

    @property
    def answer_length(self) -> int:
        """The characters of an answer that lists the ground truth."""
        return len(serialize_objects(self.objects))


@dataclass(frozen=True)
class RecordRules:
    """Rules by which the records of a run are read.

    units: of plain numbers (custom.coord_tokens.skip_bbox_norm); None takes them from each record's `units`, without
    which plain numbers are refused. reads_objects: whether a record must have objects, width and height; otherwise
    these keys are ignored, since a file for another training may have them in another form. images_exist: whether every
    image must be a file. image_roots: folders that may hold images, besides the data file's. demand: raises
    ConfigError, with paths below the record, for what the trainer lacks.
    """

    units: Unit | None = None
    reads_objects: bool = True
    images_exist: bool = True
    image_roots: tuple[str, ...] = ()
    demand: Callable[[Record], None] | None = None

    def without_images(self) -> RecordRules:
        """Return the same rules, with images that may be missing."""
        return replace(self, images_exist=False)


AS_DECLARED = RecordRules()


def units_by(skip_bbox_norm: bool | None) -> Unit | None:
    """Return the units of plain numbers by the configuration's key; None leaves it to each record."""
    return None if skip_bbox_norm is None else "bins" if skip_bbox_norm else "pixels"


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a data file in the reproducibility record; sha256: of the file's bytes."""

    path: str
    records: int
    sha256: str


@dataclass(frozen=True)
class Line:
    """A line of a data file that is not blank.

    path: of the file. position: among such lines, from 0. number: line number in the file, from 1.
    """

    path: Path
    position: int
    number: int
    text: bytes

    def record(self, rules: RecordRules) -> Record:
        """Read the line. Raises ConfigError with every problem at `file:line field`."""
        try:
            return _record(self, rules)
        except ConfigError as error:
            kind = OtherFormError if isinstance(error, OtherFormError) else ConfigError
            raise kind([_with_prefix(f"{self.path}:{self.number} ", problem) for problem in error.problems]) from error

    def problems(self, error: ConfigError) -> Sequence[Problem]:
        """Return the problems of this line. Raises the error if the first line, and so all, has another tool's form."""
        if self.position == 0 and isinstance(error, OtherFormError):
            raise error
        return error.problems


def load_records(path: Path | str, limit: int | None = None, rules: RecordRules = AS_DECLARED) -> list[Record]:
    """Read the first `limit` records of a JSONL file.

    Raises ConfigError with every broken line (at most 20), each as `file:line field`.
    """
    records: list[Record] = []
    problems: list[Problem] = []
    for line in islice(lines(path), limit):
        try:
            records.append(line.record(rules))
        except ConfigError as error:
            problems += line.problems(error)
        if len(problems) >= MAX_REPORTED_PROBLEMS:
            break
    if problems:
        raise ConfigError(problems)
    if not records:
        raise ConfigError([no_records(path)])
    return records


def load_record(
    path: Path | str,
    position: int,
    *,
    limit: int | None = None,
    rules: RecordRules = AS_DECLARED,
    named: str = "position",
) -> Record:
    """Read only the record at `position` (from 0) of the first `limit`, as `load_records` does.

    named: the option that gave the position, for errors. Raises ConfigError for a position outside the file, and for a
    broken line.
    """
    found = next(islice(lines(path), position, limit), None) if position >= 0 else None
    if found is None:
        count = sum(1 for _ in islice(lines(path), limit))
        rule = f"must lie in 0..{count - 1}" if count else "there is no record"
        where = f"{path} has {count} records, counted from 0"
        raise refused(named, position, f"{rule}: {where}", "take one of them")
    return found.record(rules)


def lines(path: Path | str) -> Iterator[Line]:
    """Yield the lines of a data file that are not blank. Raises ConfigError if it cannot be read."""
    path = Path(path)
    if not os.path.isfile(path):
        raise refused(str(path), None, "no such file", "correct the path")
    try:
        with path.open("rb") as file:
            position = 0
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield Line(path, position, number, text)
                    position += 1
    except OSError as error:
        raise refused(
            str(path), None, f"must be readable ({error.strerror})", "check the file's permissions"
        ) from error


def no_records(path: Path | str) -> Problem:
    """Return the problem of a data file without a record."""
    return Problem(str(path), None, "must hold at least one record", "write one JSON object a line")


def is_missing(image: str) -> bool:
    """Whether an image of a record is a path without a file."""
    return not image.startswith("data:") and not os.path.isfile(image)


def fingerprint(path: Path | str, records: Sequence[Record]) -> Fingerprint:
    """Return the sha256 of the data file (as `sha256sum` prints it) and how many of its records are in use."""
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fingerprint(str(path), len(records), digest)


def _record(line: Line, rules: RecordRules) -> Record:
    raw = _mapping(line.text, is_first=line.position == 0)
    if rules.reads_objects:
        check_form(raw)
    sides = _side(raw, "width", rules), _side(raw, "height", rules)
    record = Record(
        index=line.position,
        sample_id=str(raw.get("sample_id", f"{line.path.name}:{line.number}")),
        images=_images(raw, line.path.parent, rules),
        width=sides[0],
        height=sides[1],
        objects=_objects(raw, sides, rules),
        summary=_optional(raw, "summary", str, "a string"),
        metadata=_optional(raw, "metadata", dict, "a mapping") or {},
    )
    if rules.demand is not None:
        rules.demand(record)
    return record


def _mapping(text: bytes, *, is_first: bool) -> dict[str, Any]:
    shown = text.decode(errors="replace").strip()[:80]
    try:
        raw = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        rule = f"must be UTF-8 ({error.reason} at byte {error.start})"
        raise refused("", shown, rule, "save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        if is_first and shown in ("{", "["):
            raise opened_document(shown) from error
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise refused("", shown, f"must be JSON ({why})", "write one JSON object a line") from error
    if not isinstance(raw, dict):
        raise other_document(raw)
    if b"\\u" in text and not _can_be_written(raw):
        rule = "must be text, and has half of a surrogate pair (such as \\ud800)"
        raise refused("", shown, rule, "write both halves, or the character itself")
    return raw


def _can_be_written(raw: Mapping[str, Any]) -> bool:
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _side(raw: Mapping[str, Any], key: str, rules: RecordRules) -> int:
    if not rules.reads_objects:
        return 0
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        rule = "is required, as a positive integer" if value is None else "must be a positive integer"
        raise refused(key, value, rule, f"write the image's {key} in pixels")
    if value > LONGEST_SIDE:
        raise refused(key, value, f"must be at most {LONGEST_SIDE:,}", f"write the image's {key} in pixels")
    return value


def _optional(raw: Mapping[str, Any], key: str, kind: type, noun: str) -> Any:
    value = raw.get(key)
    if value is not None and not isinstance(value, kind):
        raise refused(key, value, f"must be {noun}", "correct it or leave it out")
    return value


def _images(raw: Mapping[str, Any], folder: Path, rules: RecordRules) -> tuple[str, ...]:
    images = raw.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(item, str) and item for item in images):
        rule = "must be a non-empty list of strings"
        raise refused("images", images, rule, "write paths relative to the JSONL file's folder")
    found = tuple(_image(item, f"images[{i}]", folder, rules) for i, item in enumerate(images))
    for i, image in enumerate(found):
        if rules.images_exist and is_missing(image):
            way_out = "write the path relative to the JSONL file's folder"
            raise refused(f"images[{i}]", images[i], f"no such file under {folder}", way_out)
    return found


def _image(item: str, path: str, folder: Path, rules: RecordRules) -> str:
    if item.startswith("data:"):
        return item
    try:
        found = os.path.realpath(folder / item)
    except ValueError as error:  # a NUL character
        raise refused(path, item, f"no file can have this name ({error})", "correct the path") from error
    if not leads_inside(found, (folder, *rules.image_roots)):
        rule = f"leads to {found}, outside of the data file's folder {folder}"
        way_out = "move it there, or name its folder in custom.image_roots, ROOT_IMAGE_DIR or `init --images`"
        raise refused(path, item, rule, way_out)
    return found


def _objects(raw: Mapping[str, Any], sides: tuple[int, int], rules: RecordRules) -> tuple[GTObject, ...]:
    if not rules.reads_objects:
        return ()
    objects = raw.get("objects")
    if not isinstance(objects, list):
        raise refused("objects", objects, "must be a list", "write [] for an image without objects")
    measure = _measure(raw, sides, rules)
    return tuple(_object(item, f"objects[{i}]", measure) for i, item in enumerate(objects))


def _measure(raw: Mapping[str, Any], sides: tuple[int, int], rules: RecordRules) -> Measure:
    """Return the units of a record's coordinates: its own, or else the configuration's."""
    units = raw.get("units")
    if units is None:
        return Measure(rules.units, sides)
    if units not in get_args(Unit):
        raise refused("units", units, "must be bins or pixels", "write what the plain numbers of this record are")
    if rules.units not in (None, units):
        rule = f"contradicts custom.coord_tokens.skip_bbox_norm, by which plain numbers are {rules.units}"
        raise refused("units", units, rule, "correct one of the two; without skip_bbox_norm each record's units count")
    return Measure(units, sides, of_record=True)


def _object(item: Any, path: str, measure: Measure) -> GTObject:
    try:
        return read_object(item, measure)
    except InvalidObject as error:
        problem = _with_prefix(path, error.problem)
        if error.problem.path == ".desc" and (other := [key for key in OTHER_NAMES if key in item]):
            problem = replace(problem, way_out=f"rename its key {other[0]} to desc")
        raise ConfigError([problem]) from error


def _with_prefix(path: str, problem: Problem) -> Problem:
    return replace(problem, path=f"{path}{problem.path}".rstrip())
