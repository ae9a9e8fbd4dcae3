"""Answers in other models' own form: JSON with plain numbers, as Qwen3-VL lists boxes.

    ```json
    [{"bbox_2d": [789, 115, 961, 448], "label": "cat"}]
    ```

Read are fenced and bare JSON, lists and mappings (`{"objects": [...]}`, `{"object_1": {...}}`), `label` or `desc`, and
`bbox_2d` or `poly`. Commas before a closing bracket are tolerated; of a broken or truncated answer, its whole objects
are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_api.coordinates import BINS, coord_bin
from stage2_trainer.matching.ground_truth import Unit
from stage2_trainer.matching.parse import Kind
from stage2_trainer.matching.scan import INSIDE_STRING
from stage2_trainer.scores.scored_image import CUT_BY_LENGTH, CUT_BY_REPETITION, MeasuredObject, ReadAnswer, loops

LARGEST = 1e7  # of a coordinate
DEEPEST = 8  # brackets around an object that is read
NAMES = ("label", "desc")
BOX, OUTLINE = "bbox_2d", "poly"
PLACES = frozenset({BOX, OUTLINE})
POINTS = frozenset({"point_2d", "point", "points"})
BOX_MARKS = ("<|box_start|>", "<box>", "<loc_", "<loc0")  # of Qwen2-VL, InternVL, Florence-2 and PaliGemma
THOUGHT = "</think>"
FENCE = re.compile(r"```[A-Za-z]*(.*?)(?:```|\Z)", re.DOTALL)
OPENING = re.compile(r"[\[{]")
STRING_OR_BRACKET = re.compile(rf'"{INSIDE_STRING}"|[\[\]{{}}"]', re.DOTALL)
STRING_OR_COMMA = re.compile(rf'("{INSIDE_STRING}")|,(?=\s*[\]}}])', re.DOTALL)
BEGINS_JSON = re.compile(r"""[\[{]\s*(?:["'\[{}\]]|\Z)""")
OPENED_BY = {"]": "[", "}": "{"}


@dataclass(frozen=True)
class PlainObject:
    """An object of an answer: x and y of its box's corners, or of its outline's points, in turn.

    in_tokens: they were coordinate tokens, which are bins.
    """

    desc: str
    kind: Kind
    numbers: tuple[float, ...]
    in_tokens: bool = False

    def measured(self, unit: Unit, size: tuple[int, int]) -> MeasuredObject:
        """Return the object in pixels of its image. unit: of plain numbers. size: width and height of the image."""
        if self.in_tokens or unit == "bins":
            numbers = [number * size[place % 2] / BINS for place, number in enumerate(self.numbers)]
        else:
            numbers = [*self.numbers]
        return MeasuredObject.from_points(self.desc, self.kind, numbers, size)


@dataclass(frozen=True)
class PlainAnswer:
    """The content of an answer.

    invalid: entries that are no objects. points: those of them that are points. closed: no bracket is open at the end.
    found_json: whether it has JSON at all. broken: JSON in it cannot be parsed.
    """

    objects: tuple[PlainObject, ...]
    invalid: int
    points: int
    closed: bool
    found_json: bool
    broken: bool

    def numbers(self, size: tuple[int, int]) -> Iterator[tuple[float, int]]:
        """Yield each plain number, with the side of the image (width, height) along which it lies."""
        for one in self.objects:
            if not one.in_tokens:
                yield from ((number, size[place % 2]) for place, number in enumerate(one.numbers))

    @property
    def is_whole(self) -> bool:
        """Whether it is JSON, all of which was read."""
        return self.found_json and self.closed and not self.broken and not self.invalid

    def measured(self, unit: Unit, size: tuple[int, int], finish_reason: str | None) -> ReadAnswer:
        """Return the answer in pixels of its image. finish_reason: as servers report it."""
        truncated = not self.closed or finish_reason == CUT_BY_LENGTH
        objects = tuple(one.measured(unit, size) for one in self.objects)
        return ReadAnswer(
            objects,
            scores=None,
            parsed=self.is_whole and not truncated,
            truncated=truncated,
            looped=finish_reason == CUT_BY_REPETITION or loops(objects),
        )


def read_plain_answer(text: str) -> PlainAnswer:
    """Read an answer. What stands around its JSON is passed over, and so is what a model thought before it."""
    answer = text.rpartition(THOUGHT)[2]
    fenced = [inside for inside in FENCE.findall(answer) if OPENING.search(inside)]
    parts = [_Json.from_text(part) for part in fenced or [answer]]
    entries = [entry for part in parts for value in part.values for entry in _entries(value, DEEPEST)]
    objects = [_object(entry) for entry in entries]
    valid = tuple(one for one in objects if one is not None)
    return PlainAnswer(
        objects=valid,
        invalid=len(entries) - len(valid),
        points=sum(
            isinstance(entry, dict) and not PLACES & entry.keys() and bool(POINTS & entry.keys()) for entry in entries
        ),
        closed=parts[-1].closed,
        found_json=any(part.values or part.broken for part in parts),
        broken=any(part.broken for part in parts) or not all(part.closed for part in parts[:-1]),
    )


def seen_form(text: str) -> str:
    """Describe the form of an answer that cannot be read, for people."""
    answer = read_plain_answer(text)
    if not text.strip():
        return "no text"
    if answer.points:
        return "points (point_2d), where boxes (bbox_2d) are needed"
    if (mark := next((mark for mark in BOX_MARKS if mark in text), None)) is not None:
        return f"boxes marked by {mark}"
    if answer.invalid and not answer.broken:
        return "JSON whose entries have no label with bbox_2d [x1, y1, x2, y2]"
    if not answer.closed:
        return "JSON that breaks off"
    return "broken JSON" if answer.found_json else "text without JSON"


@dataclass(frozen=True)
class _Json:
    """The JSON in a text: its outermost whole values, whether all brackets are closed, and whether any is broken."""

    values: Sequence[Any]
    closed: bool
    broken: bool

    @classmethod
    def from_text(cls, text: str) -> _Json:
        pairs, unclosed, in_string = _brackets(text)
        values, broken, end = [], False, 0
        for start in sorted([*pairs, *unclosed]):
            if start < end or not BEGINS_JSON.match(text, start):
                continue  # within a value, or a bracket of a sentence, [1] or (see [below])
            try:
                values.append(_parsed(text[start : pairs[start] + 1]))
                end = pairs[start] + 1
            except KeyError:
                continue  # the whole values inside are read
            except (ValueError, RecursionError):
                broken = True
        if in_string and text.rstrip().endswith(("]", "}")):
            return cls(values, closed=True, broken=True)  # a quotation mark within a name, not an end within one
        return cls(values, closed=not any(BEGINS_JSON.match(text, start) for start in unclosed), broken=broken)


def _brackets(text: str) -> tuple[dict[int, int], list[int], bool]:
    """Return the pairs of brackets that lie no deeper than DEEPEST, the brackets that the text leaves open, and whether
    it ends within a string. Brackets in strings do not count; outside of brackets nothing is a string.
    """
    pairs: dict[int, int] = {}
    unclosed: list[int] = []
    count = Counter[str]()
    at = 0
    while found := (STRING_OR_BRACKET if unclosed else OPENING).search(text, at):
        at = found.end()
        mark = found[0]
        if mark in "[{":
            unclosed.append(found.start())
            count[mark] += 1
        elif mark == '"':
            return pairs, unclosed, True
        elif mark in OPENED_BY and count[OPENED_BY[mark]]:
            start = unclosed.pop()
            while text[start] != OPENED_BY[mark]:  # an inner bracket that was never closed
                count[text[start]] -= 1
                start = unclosed.pop()
            count[text[start]] -= 1
            if len(unclosed) < DEEPEST:
                pairs[start] = found.start()
    return pairs, unclosed, False


def _parsed(text: str) -> Any:
    """Return a JSON value. Commas before a closing bracket are left out. Raises ValueError or RecursionError."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(STRING_OR_COMMA.sub(lambda found: found[1] or "", text))


def _entries(value: Any, depth: int) -> Iterator[Any]:
    """Yield what is an object or is meant to be one: all that is no list or mapping of further ones."""
    if isinstance(value, dict) and not (PLACES | POINTS) & value.keys() and any(map(_holds_entries, value.values())):
        value = [one for one in value.values() if isinstance(one, list | dict)]
    if isinstance(value, list) and depth and all(isinstance(one, list | dict) for one in value):
        for one in value:
            yield from _entries(one, depth - 1)
    elif value and not (isinstance(value, dict) and all(one == [] for one in value.values())):
        yield value


def _holds_entries(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict) for one in value))


def _object(entry: Any) -> PlainObject | None:
    """Return the object of an entry; None where it has no name or no place, or two."""
    if not isinstance(entry, dict):
        return None
    names = [entry[key] for key in NAMES if key in entry]
    places = PLACES & entry.keys()
    if len(places) != 1 or not names or names[0] != names[-1] or not isinstance(names[0], str) or not names[0].strip():
        return None
    (place,) = places
    numbers = _flat(entry[place])
    bins = [coord_bin(one) for one in numbers if isinstance(one, str)]
    in_tokens = bool(bins) and len(bins) == len(numbers) and None not in bins
    values = tuple(value for one in (bins if in_tokens else numbers) if (value := _number(one)) is not None)
    if len(values) != len(numbers):
        return None
    if place == OUTLINE:
        return PlainObject(names[0], "poly", values, in_tokens) if len(values) >= 6 and len(values) % 2 == 0 else None
    fits = len(values) == 4 and values[0] <= values[2] and values[1] <= values[3]
    return PlainObject(names[0], "bbox", values, in_tokens) if fits else None


def _flat(value: Any) -> list[Any]:
    """Return the coordinates of a list, flat or in pairs; none of anything else."""
    if not isinstance(value, list):
        return []
    return [number for one in value for number in (one if isinstance(one, list) else [one])]


def _number(value: Any) -> float | None:
    """Return a number that an image may have, also one that is written as text."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None
