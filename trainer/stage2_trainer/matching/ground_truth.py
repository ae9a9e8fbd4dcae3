"""Ground truth: the one reader of an object in a record or an assistant payload, and its serialised text.

Source: semantics, sections 2 and 4.3.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from stage2_api.coordinates import MAX_BIN, coord_bin, coord_token, to_bin
from stage2_api.errors import Problem
from stage2_trainer.matching.parse import BLANK_DESC, KIND_OF_KEY, NO_OBJECT_VALUE, NOT_ONE_GEOMETRY, WRONG_COUNT, Kind
from stage2_trainer.matching.scan import INSIDE_STRING, OBJECT_KEY, WHITE_SPACE
from stage2_trainer.matching.tokens import MatchingError

_DESC_VALUE = re.compile(rf'"desc": "({INSIDE_STRING})"', re.DOTALL)
MIXED_COORDINATES = "tokens_and_numbers_mixed"
NOT_COORDINATES = "coordinates_are_no_bins"
REFUSED_GEOMETRY = "geometry_is_not_of_this_format"
REVERSED_CORNERS = "corners_are_reversed"
TOKENS_AMONG_PIXELS = "tokens_are_no_pixels"
UNDECLARED_UNITS = "units_are_not_declared"
TOKEN_IN_DESC = "desc_holds_a_token"
SHARES = "coordinates_are_shares"
WRONG_POINTS = "poly_points_differ"

_REFUSED_GEOMETRY = {
    "line": "write a thin poly, or leave the object out",
    "bbox": "rename the key to bbox_2d",
    "polygon": "rename the key to poly",
}
_OTHER_NAMES = ("label", "category", "name", "class", "ref", "phrase")  # of other tools
_DECLARE = (
    'write coordinate tokens, or "units": "bins" or "pixels" into the record; '
    "custom.coord_tokens.skip_bbox_norm says it for all records: true for bins, false for pixels"
)

_TOKEN = re.compile(r"<\|[^\s|<>]+\|>")

Unit = Literal["bins", "pixels"]


@dataclass(frozen=True)
class Measure:
    """The units of an object's coordinates.

    unit: of plain numbers; None if undeclared, and then they are refused. sides: width and height of the image, for
    pixels. of_record: whether the record itself declares the unit; it must not mix tokens with pixels then.
    """

    unit: Unit | None = "bins"
    sides: tuple[int, int] = (0, 0)
    of_record: bool = False


BINS_ONLY = Measure()


@dataclass(frozen=True)
class GTObject:
    """One true object: its description, its kind, and its bins (4 for a bbox, x and y in turn for a poly)."""

    desc: str
    kind: Kind
    bins: tuple[int, ...]


@dataclass(frozen=True)
class GroundTruth:
    """The true objects of one record, in the order of their indices, and the dropped ones: (key, reason)."""

    objects: tuple[GTObject, ...]
    dropped: tuple[tuple[str, str], ...] = ()


class InvalidObject(ValueError):
    """An object that breaks the contract: the reason for counters, the problem for people.

    The problem's path begins at the object: `.bbox_2d[3]`, or nothing for the object itself.
    """

    def __init__(self, reason: str, problem: Problem) -> None:
        super().__init__(str(problem))
        self.reason = reason
        self.problem = problem


def holds_token(desc: str) -> bool:
    """Whether a text contains the spelling of a token (a coordinate, an end of turn): a tokenizer would read that."""
    return _TOKEN.search(desc) is not None


def read_object(value: Any, measure: Measure = BINS_ONLY) -> GTObject:
    """Read `{desc, bbox_2d | poly}`; coordinates, flat or in pairs, are tokens or numbers.

    Raises InvalidObject with the first rule that is broken.
    """
    if not isinstance(value, Mapping):
        raise _invalid(NO_OBJECT_VALUE, "", value, "must be a mapping", "write {desc, bbox_2d} or {desc, poly}")
    for key, way_out in _REFUSED_GEOMETRY.items():
        if key in value:
            raise _invalid(REFUSED_GEOMETRY, f".{key}", value[key], "is not a geometry of this format", way_out)
    desc = value.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        other = next((key for key in _OTHER_NAMES if value.get(key)), None)
        way_out = f"rename the key {other} to desc" if desc is None and other else "name what the object is"
        raise _invalid(BLANK_DESC, ".desc", desc, "must be a non-blank string", way_out)
    if holds_token(desc):
        rule = "must not hold the text of a token, <|...|>: it would be read as that token"
        raise _invalid(TOKEN_IN_DESC, ".desc", desc, rule, "write the name in other characters")
    present = [key for key in KIND_OF_KEY if value.get(key) is not None]
    if len(present) != 1:
        rule = "must have exactly one of bbox_2d and poly"
        raise _invalid(NOT_ONE_GEOMETRY, "", present, rule, "keep one, or split the object")
    key = present[0]
    bins = _coordinates(value[key], f".{key}", measure)
    if KIND_OF_KEY[key] == "bbox":
        _check_bbox(bins, value[key])
    else:
        _check_poly(bins, value)
    return GTObject(desc, KIND_OF_KEY[key], bins)


def ground_truth(payload: Mapping[str, Any]) -> GroundTruth:
    """Read an assistant payload: `object_{i}` to `{desc, bbox_2d | poly}`, coordinates as tokens or as numbers in bins.

    Objects that break the contract are dropped and listed; keys of another form are not objects.
    """
    keys = sorted((int(match[1]), key) for key in payload if (match := OBJECT_KEY.fullmatch(key)))
    objects: list[GTObject] = []
    dropped: list[tuple[str, str]] = []
    for _, key in keys:
        try:
            objects.append(read_object(payload[key]))
        except InvalidObject as error:
            dropped.append((key, error.reason))
    return GroundTruth(tuple(objects), tuple(dropped))


def _coordinates(values: Any, path: str, measure: Measure) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple)):
        rule = "must be a list of coordinates"
        raise _invalid(NOT_COORDINATES, path, values, rule, "write [x1, y1, x2, y2, ...]")
    if values and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in values):
        flat = list(chain.from_iterable(values))
    else:
        flat = list(values)
    if all(isinstance(value, str) for value in flat):
        _check_tokens(values, path, measure)
        return tuple(_token_bin(value, f"{path}[{i}]") for i, value in enumerate(flat))
    if any(isinstance(value, str) for value in flat):
        rule = "mixes numbers and coord tokens"
        raise _invalid(MIXED_COORDINATES, path, values, rule, "use one of the two within an object")
    if measure.unit is None:
        rule = "plain numbers must say whether they are bins or pixels"
        raise _invalid(UNDECLARED_UNITS, path, values, rule, _DECLARE)
    if _are_shares(flat):
        rule = "all lie in 0 to 1: they are shares of the image, neither bins nor pixels"
        raise _invalid(SHARES, path, values, rule, "multiply them by 1000 for bins, or by width and height for pixels")
    sides = measure.sides if measure.unit == "pixels" else (None, None)
    return tuple(_number_bin(value, f"{path}[{i}]", sides[i % 2]) for i, value in enumerate(flat))


def _check_tokens(values: Any, path: str, measure: Measure) -> None:
    if values and measure.of_record and measure.unit == "pixels":
        rule = "is written in tokens, and its record's units are pixels"
        raise _invalid(TOKENS_AMONG_PIXELS, path, values, rule, "remove units, or write pixels")


def _token_bin(value: str, path: str) -> int:
    found = coord_bin(value)
    if found is None:
        rule = f"must be a coord token {coord_token(0)} .. {coord_token(MAX_BIN)}"
        raise _invalid(NOT_COORDINATES, path, value, rule, "correct the token")
    return found


def _number_bin(value: Any, path: str, side: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _finite(value):
        rule = "must be a finite number or a coord token"
        raise _invalid(NOT_COORDINATES, path, value, rule, "correct the coordinate")
    if side is None:
        if not 0 <= round(value) <= MAX_BIN:
            rule = f"must lie in 0..{MAX_BIN} bins"
            way_out = "correct it (Qwen3-VL's 1000 becomes 999), or set units to pixels"
            raise _invalid(NOT_COORDINATES, path, value, rule, way_out)
        return round(value)
    if not 0 <= value <= side:
        rule = f"must lie in 0..{side} pixels"
        raise _invalid(NOT_COORDINATES, path, value, rule, "clip it to the image, or correct width/height")
    return to_bin(value, side)


def _are_shares(values: Sequence[Any]) -> bool:
    """Whether numbers are too small for bins or pixels: all lie in 0..1, and not all are whole."""
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    in_range = all(0 <= number <= 1 for number in numbers)
    return in_range and len(numbers) == len(values) and any(number % 1 for number in numbers)


def _finite(value: float) -> bool:
    # JSON allows whole numbers that are too large for a float, on which math.isfinite raises
    return isinstance(value, int) or math.isfinite(value)


def _check_bbox(bins: tuple[int, ...], value: Any) -> None:
    if len(bins) != 4:
        raise _invalid(WRONG_COUNT, ".bbox_2d", value, "must have 4 coordinates", "write [x1, y1, x2, y2]")
    if bins[0] > bins[2] or bins[1] > bins[3]:
        rule = "must have x1 <= x2 and y1 <= y2"
        raise _invalid(REVERSED_CORNERS, ".bbox_2d", value, rule, "write the top left corner first")


def _check_poly(bins: tuple[int, ...], value: Mapping[str, Any]) -> None:
    if len(bins) < 6 or len(bins) % 2:
        rule = "must have an even number of at least 6 coordinates"
        raise _invalid(WRONG_COUNT, ".poly", value["poly"], rule, "write 3 or more points")
    points = value.get("poly_points")
    if points is not None and points != len(bins) // 2:
        rule = f"must equal the {len(bins) // 2} points of poly"
        raise _invalid(WRONG_POINTS, ".poly_points", points, rule, "correct it or leave it out")


def _invalid(reason: str, path: str, value: object, rule: str, way_out: str) -> InvalidObject:
    return InvalidObject(reason, Problem(path, value, rule, way_out))


def serialize_objects(objects: Sequence[GTObject], start_index: int = 1) -> str:
    """Return the whole answer, `{"object_1": {...}, ...}`; polygons as lists of pairs."""
    entries = (
        f'"object_{index}": {json.dumps(_value(one), ensure_ascii=False)}'
        for index, one in enumerate(objects, start_index)
    )
    return "{" + ", ".join(entries) + "}"


def append_text(prefix_text: str, objects: Sequence[GTObject], start_index: int) -> str:
    """Return the text after a prefix: missed objects, then one `}`. Raises MatchingError if nothing can follow."""
    last = prefix_text.rstrip(WHITE_SPACE)[-1:]
    if last not in ("{", ",", "}"):
        raise MatchingError(
            f"prefix ends in {last!r}; it must end in '{{', ',' or '}}'; cut it after its last closed object"
        )
    if last == "," and not objects:
        raise MatchingError("prefix ends in ',' and no object follows; cut the comma off")
    comma = ", " if last == "}" and objects else ""
    return comma + serialize_objects(objects, start_index)[1:]


def desc_value_spans(text: str) -> list[tuple[int, int]]:
    """Return the spans of all `"desc"` values in a serialised text, without quotes (characters, end exclusive)."""
    return [match.span(1) for match in _DESC_VALUE.finditer(text)]


def _value(one: GTObject) -> dict[str, Any]:
    tokens = [coord_token(k) for k in one.bins]
    if one.kind == "bbox":
        return {"desc": one.desc, "bbox_2d": tokens}
    return {"desc": one.desc, "poly": [list(pair) for pair in zip(tokens[::2], tokens[1::2], strict=True)]}
