"""JSONL records: what a person's data file must look like, read into ground truth in coordinate bins.

One record a line (semantics, section 2): `images`, `objects`, `width`, `height`, optional `summary` and
`metadata`. Every mistake in the file is reported with its line and field, before a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stage2_api.coordinates import MAX_BIN, coord_bin, coord_token, to_bin
from stage2_api.errors import ConfigError, Problem

MAX_REPORTED_PROBLEMS = 20

_REFUSED_GEOMETRY = {
    "line": "write a thin poly, or leave the object out",
    "bbox": "rename the key to bbox_2d",
    "polygon": "rename the key to poly",
}


@dataclass(frozen=True)
class Record:
    """One image (or several) with its ground truth.

    `payload` maps `object_1`, `object_2`, ... to `{"desc": str, "bbox_2d" | "poly": list[int]}`, coordinates in bins
    0..999, x and y in turn. `images` are absolute paths or `data:` URLs. `index` is the record's position in the file.
    """

    index: int
    sample_id: str
    images: tuple[str, ...]
    width: int
    height: int
    payload: Mapping[str, Mapping[str, Any]]
    summary: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a data file in the reproducibility record; `sha256` is that of the file's bytes."""

    path: str
    records: int
    sha256: str


class _Invalid(ValueError):
    """A broken rule inside one record: field path, value, rule and way out, without the line."""

    def __init__(self, path: str, value: object, rule: str, way_out: str) -> None:
        super().__init__(rule)
        self.path, self.value, self.rule, self.way_out = path, value, rule, way_out

    def problem(self, file: Path, line: int) -> Problem:
        """The same with its place, `file:line field`."""
        return Problem(f"{file}:{line} {self.path}".rstrip(), self.value, self.rule, self.way_out)


@dataclass(frozen=True)
class _Place:
    """A line: its file, the record's position among the records, its number from 1; whether its images must exist."""

    path: Path
    position: int
    number: int
    images_exist: bool = True


def load_records(path: Path | str, limit: int | None = None, *, numbers_are_bins: bool = False) -> list[Record]:
    """Read the first `limit` records of a JSONL file.

    `numbers_are_bins` (custom.coord_tokens.skip_bbox_norm) takes plain numbers as bins 0..999 instead of pixels.
    Raises ConfigError with every broken line (at most 20), each as `file:line field`.
    """
    path = _existing(path)
    records: list[Record] = []
    problems: list[Problem] = []
    for number, line in _lines(path, limit):
        try:
            records.append(_record(line, _Place(path, len(records), number), numbers_are_bins=numbers_are_bins))
        except _Invalid as error:
            problems.append(error.problem(path, number))
        if len(problems) == MAX_REPORTED_PROBLEMS:
            break
    if problems:
        raise ConfigError(tuple(problems))
    if not records:
        raise ConfigError((Problem(str(path), None, "must hold at least one record", "write one JSON object a line"),))
    return records


def load_record(
    path: Path | str,
    position: int,
    *,
    limit: int | None = None,
    numbers_are_bins: bool = False,
    images_exist: bool = True,
    named: str = "position",
) -> Record:
    """Read one record as `load_records` does, and no other: the one at `position` (from 0) of the first `limit`.

    `images_exist` false lets its images be missing. Raises ConfigError for a position outside the file, which it calls
    by the name that a person gave it under, and for a broken line.
    """
    path = _existing(path)
    found = next(islice(_lines(path, limit), position, None), None) if position >= 0 else None
    if found is None:
        count = sum(1 for _ in _lines(path, limit))
        rule = f"must lie in 0..{count - 1}" if count else "there is no record to take"
        where = f"{path} has {count} records, counted from 0"
        raise ConfigError((Problem(named, position, f"{rule}: {where}", "take one of them"),))
    number, line = found
    place = _Place(path, position, number, images_exist=images_exist)
    try:
        return _record(line, place, numbers_are_bins=numbers_are_bins)
    except _Invalid as error:
        raise ConfigError((error.problem(path, number),)) from error


def fingerprint(path: Path | str, records: Sequence[Record]) -> Fingerprint:
    """Return the sha256 of the data file (as `sha256sum` prints it) and how many of its records are in use."""
    with Path(path).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Fingerprint(str(path), len(records), digest)


def _existing(path: Path | str) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ConfigError((Problem(str(path), None, "must be an existing JSONL file", "correct the path"),))
    return path


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    """The numbers (from 1, blank lines counted) and the bytes of the first `limit` lines that are not blank."""
    with path.open("rb") as file:
        yield from islice(((number, line) for number, line in enumerate(file, start=1) if line.strip()), limit)


def _record(line: bytes, place: _Place, *, numbers_are_bins: bool) -> Record:
    raw = _mapping(line)
    width, height = _side(raw, "width"), _side(raw, "height")
    sides = None if numbers_are_bins else (width, height)
    return Record(
        index=place.position,
        sample_id=str(raw.get("sample_id", f"{place.path.name}:{place.number}")),
        images=_images(raw, place),
        width=width,
        height=height,
        payload=_payload(raw, sides),
        summary=_optional(raw, "summary", str, "a string"),
        metadata=_optional(raw, "metadata", dict, "a mapping") or {},
    )


def _mapping(line: bytes) -> dict[str, Any]:
    shown = line.decode(errors="replace").strip()[:80]
    try:
        raw = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _Invalid(
            "", shown, f"must be UTF-8 ({error.reason} at byte {error.start})", "save it as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        raise _Invalid("", shown, f"must be JSON ({error.msg})", "write one JSON object a line") from error
    if not isinstance(raw, dict):
        raise _Invalid("", shown, "must be a JSON object", "write one JSON object a line")
    return raw


def _side(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _Invalid(key, value, "must be a positive integer", f"write the image's {key} in pixels")
    return value


def _optional(raw: Mapping[str, Any], key: str, kind: type, noun: str) -> Any:
    value = raw.get(key)
    if value is not None and not isinstance(value, kind):
        raise _Invalid(key, value, f"must be {noun}", "correct it or leave it out")
    return value


def _images(raw: Mapping[str, Any], place: _Place) -> tuple[str, ...]:
    images = raw.get("images")
    if not isinstance(images, list) or not images or not all(isinstance(item, str) and item for item in images):
        raise _Invalid(
            "images", images, "must be a non-empty list of strings", "write paths relative to the JSONL file's folder"
        )
    return tuple(_image(item, f"images[{i}]", place) for i, item in enumerate(images))


def _image(item: str, path: str, place: _Place) -> str:
    if item.startswith("data:"):
        return item
    folder = place.path.parent
    resolved = (folder / item).resolve()
    if place.images_exist and not resolved.is_file():
        raise _Invalid(path, item, f"no such file under {folder}", "write the path relative to the JSONL file's folder")
    return str(resolved)


def _payload(raw: Mapping[str, Any], sides: tuple[int, int] | None) -> dict[str, dict[str, Any]]:
    objects = raw.get("objects")
    if not isinstance(objects, list):
        raise _Invalid("objects", objects, "must be a list", "write [] for an image without objects")
    return {f"object_{i + 1}": _object(item, f"objects[{i}]", sides) for i, item in enumerate(objects)}


def _object(item: Any, path: str, sides: tuple[int, int] | None) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise _Invalid(path, item, "must be a mapping", "write {desc, bbox_2d} or {desc, poly}")
    for key, way_out in _REFUSED_GEOMETRY.items():
        if key in item:
            raise _Invalid(f"{path}.{key}", item[key], "is not a geometry of this format", way_out)
    desc = item.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        raise _Invalid(f"{path}.desc", desc, "must be a non-blank string", "name what the object is")
    present = [key for key in ("bbox_2d", "poly") if item.get(key) is not None]
    if len(present) != 1:
        raise _Invalid(path, present, "must have exactly one of bbox_2d and poly", "keep one, or split the object")
    key = present[0]
    bins = _coordinates(item[key], f"{path}.{key}", sides)
    if key == "bbox_2d":
        _check_bbox(bins, item[key], f"{path}.{key}")
    else:
        _check_poly(bins, item, f"{path}.{key}")
    return {"desc": desc, key: bins}


def _coordinates(values: Any, path: str, sides: tuple[int, int] | None) -> list[int]:
    if not isinstance(values, list):
        raise _Invalid(path, values, "must be a list of coordinates", "write [x1, y1, x2, y2, ...]")
    flat = [part for value in values for part in (value if isinstance(value, list) else [value])]
    if all(isinstance(value, str) for value in flat):
        return [_token_bin(value, f"{path}[{i}]") for i, value in enumerate(flat)]
    if any(isinstance(value, str) for value in flat):
        raise _Invalid(path, values, "mixes numbers and coord tokens", "use one of the two within an object")
    return [_number_bin(value, f"{path}[{i}]", sides[i % 2] if sides else None) for i, value in enumerate(flat)]


def _token_bin(value: str, path: str) -> int:
    bin_index = coord_bin(value)
    if bin_index is None:
        rule = f"must be a coord token {coord_token(0)} .. {coord_token(MAX_BIN)}"
        raise _Invalid(path, value, rule, "correct the token")
    return bin_index


def _number_bin(value: Any, path: str, side: int | None) -> int:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _Invalid(path, value, "must be a finite number or a coord token", "correct the coordinate")
    largest = MAX_BIN if side is None else side
    if not 0 <= value <= largest:
        unit = "bins" if side is None else "pixels"
        raise _Invalid(path, value, f"must lie in 0..{largest} {unit}", "clip it to the image, or correct width/height")
    return round(value) if side is None else to_bin(value, side)


def _check_bbox(bins: list[int], value: object, path: str) -> None:
    if len(bins) != 4:
        raise _Invalid(path, value, "must have 4 coordinates", "write [x1, y1, x2, y2]")
    if bins[0] > bins[2] or bins[1] > bins[3]:
        raise _Invalid(path, value, "must have x1 <= x2 and y1 <= y2", "write the top left corner first")


def _check_poly(bins: list[int], item: Mapping[str, Any], path: str) -> None:
    if len(bins) < 6 or len(bins) % 2:
        raise _Invalid(
            path, item["poly"], "must have an even number of at least 6 coordinates", "write 3 or more points"
        )
    points = item.get("poly_points")
    if points is not None and points != len(bins) // 2:
        raise _Invalid(
            path + "_points", points, f"must equal the {len(bins) // 2} points of poly", "correct it or leave it out"
        )
