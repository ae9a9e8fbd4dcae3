"""An answer read from text, beside its record, and the overlaps of their objects.

Objects are compared as boxes, or as masks of the image's size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from pycocotools import mask as rle

from stage2_api.coordinates import BINS, COORD_TOKEN, coord_token, to_bin
from stage2_api.errors import ConfigError
from stage2_trainer.data.records import Record
from stage2_trainer.matching import CoordVocab, GTObject, ParsedRollout, parse_rollout
from stage2_trainer.matching.ground_truth import InvalidObject, Measure, read_object
from stage2_trainer.matching.parse import Kind, loads
from stage2_trainer.matching.tokens import BoolArray, FloatArray

NEGATIVE, NOT_EXHAUSTIVE, CROWDS = "neg_category_ids", "not_exhaustive_category_ids", "crowds"
UNJUDGED_KEYS = (NEGATIVE, NOT_EXHAUSTIVE, CROWDS)
"""Keys of a record's metadata for objects that are neither right nor wrong."""
DUPLICATE_IOU = 0.85  # IoU from which an object is a duplicate of an earlier one of the same name

Naming = Callable[[str], str]
CHARACTERS = 0x110000
LOOPED_OBJECTS = 3  # equal objects in a row that make an answer a loop
CUT_BY_LENGTH, CUT_BY_REPETITION = "length", "repetition"


@dataclass(frozen=True)
class MeasuredObject(GTObject):
    """An answered object whose place is known in pixels, so that nothing is lost by rounding to bins.

    box: left, top, width and height. mask: the run lengths of its outline in its image, as pycocotools compresses them;
    None: the object is its box. bins: the corners of the box.
    """

    box: tuple[float, float, float, float]
    mask: bytes | None = None

    @classmethod
    def from_box(
        cls, desc: str, box: Sequence[float], size: tuple[int, int], mask: bytes | None = None
    ) -> MeasuredObject:
        """Return an object with these pixels: left, top, width and height."""
        left, top, width, height = box
        corners = (left, top, left + width, top + height)
        x1, y1, x2, y2 = (to_bin(value, size[place % 2]) for place, value in enumerate(corners))
        kind: Kind = "bbox" if mask is None else "poly"
        bins = (x1, y1, x2, y2) if mask is None else (x1, y1, x2, y1, x2, y2, x1, y2)
        return cls(desc, kind, bins, (left, top, width, height), mask)

    @classmethod
    def from_points(cls, desc: str, kind: Kind, points: Sequence[float], size: tuple[int, int]) -> MeasuredObject:
        """Return an object with these pixels, x and y in turn: of a box's corners, or of an outline."""
        xs, ys = points[::2], points[1::2]
        mask = None if kind == "bbox" else _drawn(points, size)["counts"]
        return cls.from_box(desc, (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), size, mask)


@dataclass(frozen=True)
class ReadAnswer:
    """The content of an answer.

    objects: those that can be matched, in order. scores: of each, exp of the mean log-probability of its coordinate
    tokens; None if the rollout has none. parsed: the answer is whole, and each of its objects can be matched.
    truncated: it was not closed. looped: it was ended because it repeated itself, or has one object three times in a
    row.
    """

    objects: tuple[GTObject, ...]
    scores: tuple[float, ...] | None
    parsed: bool
    truncated: bool
    looped: bool


NO_ANSWER = ReadAnswer((), (), parsed=False, truncated=False, looped=False)


def read_answer(text: str, logprobs: Sequence[float] | None = None, finish_reason: str | None = None) -> ReadAnswer:
    """Read an answer. logprobs: of its coordinate tokens, in order. finish_reason: as servers report it."""
    vocab = text_vocab()
    ids = vocab.encode(text)
    parsed = parse_rollout(ids, vocab)
    scores = None
    if logprobs is not None:
        number = np.cumsum(np.asarray(ids) < BINS) - 1  # of the coordinate token at each position
        scores = tuple(
            _score([logprobs[number[place]] for place in one.token_positions]) for one in parsed.valid_objects
        )
    return from_parsed(parsed, finish_reason, scores)


def from_parsed(
    parsed: ParsedRollout, finish_reason: str | None, scores: tuple[float, ...] | None = None
) -> ReadAnswer:
    """Return the content of a parsed answer."""
    objects = tuple(GTObject(one.desc, one.kind or "bbox", one.bins) for one in parsed.valid_objects)
    truncated = parsed.truncated or finish_reason == CUT_BY_LENGTH
    return ReadAnswer(
        objects,
        scores,
        parsed=_is_whole(parsed) and parsed.clean and not truncated and not parsed.dropped and not parsed.notes,
        truncated=truncated,
        looped=finish_reason == CUT_BY_REPETITION or loops(objects),
    )


def _is_whole(parsed: ParsedRollout) -> bool:
    """Whether an answer is JSON that lists objects, or is empty.

    The parser looks for keys `object_n` and passes over all else: `{'object_1': ...}` has none.
    """
    value = loads(parsed.text)
    return isinstance(value, dict) and (not value or bool(parsed.objects))


def count_coordinates(text: str) -> int:
    """Return the number of coordinate tokens in a text."""
    return len(COORD_TOKEN.findall(text))


@cache
def text_vocab() -> CoordVocab:
    """Return the vocabulary of coordinate tokens (0 to 999) and single characters (from 1000)."""
    return CoordVocab(ids=np.arange(BINS), decode=_decode, encode=_encode, size=BINS + CHARACTERS)


def _decode(ids: list[int]) -> str:
    return "".join(coord_token(one) if one < BINS else chr(one - BINS) for one in ids)


def _encode(text: str) -> list[int]:
    ids: list[int] = []
    at = 0
    for token in COORD_TOKEN.finditer(text):
        ids += [ord(character) + BINS for character in text[at : token.start()]]
        ids.append(int(token[1]))
        at = token.end()
    return ids + [ord(character) + BINS for character in text[at:]]


def _score(logprobs: Sequence[float]) -> float:
    return math.exp(sum(logprobs) / len(logprobs))


def loops(objects: Sequence[GTObject]) -> bool:
    """Whether one object stands three times in a row."""
    windows = (objects[start : start + LOOPED_OBJECTS] for start in range(len(objects) - LOOPED_OBJECTS + 1))
    return any(len(set(window)) == 1 for window in windows)


def exact(name: str) -> str:
    """Return a description as it is."""
    return name


def normalised(name: str) -> str:
    """Return a description in lower case, without punctuation, its words separated by one space.

    >>> normalised(" Traffic-Light.")
    'traffic light'
    """
    return " ".join(re.sub(r"[\W_]+", " ", name.casefold()).split())


@dataclass(frozen=True)
class ScoredImage:
    """One record with its answer.

    true_names, names: the classes of the true and of the answered objects. crowds: which true objects are regions of
    many (COCO's iscrowd); objects in them are neither right nor wrong. absent: classes that annotators looked for and
    did not find; None if they looked for all. loose: classes of which not every object is annotated (LVIS).
    """

    sample_id: str
    size: tuple[int, int]
    truth: tuple[GTObject, ...]
    answer: ReadAnswer
    true_names: tuple[str, ...]
    names: tuple[str, ...]
    crowds: BoolArray
    masks: bool
    absent: frozenset[str] | None = None
    loose: frozenset[str] = frozenset()
    known: frozenset[str] = field(default=frozenset(), repr=False)

    @cached_property
    def scores(self) -> FloatArray:
        """The scores of the answered objects; all 1 if the rollout has none."""
        found = self.answer.scores
        return np.ones(len(self.names)) if found is None else np.asarray(found, dtype=np.float64)

    @cached_property
    def iou(self) -> FloatArray:
        """The overlap of answered (rows) and true objects; with a crowd, the answered object's share inside it."""
        return _iou(self._answered, self._true, self.crowds)

    @cached_property
    def answered_areas(self) -> FloatArray:
        """The areas of the answered objects in pixels."""
        return _areas(self._answered)

    @cached_property
    def true_areas(self) -> FloatArray:
        """The areas of the true objects in pixels."""
        return _areas(self._true)

    @cached_property
    def unchecked(self) -> BoolArray:
        """Which answered objects are of a known class that annotators did not look for in this image."""
        if self.absent is None:
            return np.zeros(len(self.names), dtype=bool)
        checked = {*self.true_names, *self.absent}
        return np.array([one in self.known and one not in checked for one in self.names], dtype=bool)

    @cached_property
    def in_loose_classes(self) -> BoolArray:
        """Which answered objects are of a class that is not fully annotated in this image."""
        return np.array([one in self.loose for one in self.names], dtype=bool)

    @cached_property
    def duplicates(self) -> BoolArray:
        """Which answered objects repeat an earlier one that is not a duplicate itself: same class, same place."""
        overlap = _iou(self._answered, self._answered, np.zeros(len(self.names), dtype=bool))
        names = np.unique(self.names, return_inverse=True)[1]
        repeats = np.tril((overlap >= DUPLICATE_IOU) & (names[:, None] == names[None, :]), -1)
        found = np.zeros(len(self.names), dtype=bool)
        for place in np.flatnonzero(repeats.any(1)):
            found[place] = bool((repeats[place] & ~found).any())
        return found

    def without_duplicates(self) -> ScoredImage:
        """Return the same image with an answer without duplicates."""
        if not self.duplicates.any():
            return self
        kept = np.flatnonzero(~self.duplicates).tolist()
        scores = self.answer.scores
        answer = replace(
            self.answer,
            objects=tuple(self.answer.objects[i] for i in kept),
            scores=None if scores is None else tuple(scores[i] for i in kept),
        )
        return replace(self, answer=answer, names=tuple(self.names[i] for i in kept))

    def as_boxes(self) -> ScoredImage:
        """Return the same image with all objects compared as boxes."""
        return replace(self, masks=False) if self.masks else self

    @cached_property
    def _answered(self) -> Sequence[Any]:
        return [_shape(one, self.size, masks=self.masks) for one in self.answer.objects]

    @cached_property
    def _true(self) -> Sequence[Any]:
        return [_shape(one, self.size, masks=self.masks) for one in self.truth]


@dataclass(frozen=True)
class Comparison:
    """How the objects of some records are compared: as masks if any record has outlines, else as boxes.

    known: the classes of all records. naming: from a description to its class.
    """

    masks: bool
    known: frozenset[str]
    naming: Naming

    @classmethod
    def from_records(cls, records: Sequence[Record], naming: Naming = exact) -> Comparison:
        """Return how the objects of these records are compared."""
        masks = any(one.kind == "poly" for record in records for one in record.objects)
        return cls(masks, frozenset(naming(name) for record in records for name in _names_in(record)), naming)

    def image(self, record: Record, answer: ReadAnswer) -> ScoredImage:
        """Return a record with its answer."""
        naming, crowds, absent = self.naming, _crowds(record), record.metadata.get(NEGATIVE)
        truth = (*record.objects, *crowds)
        return ScoredImage(
            sample_id=record.sample_id,
            size=(record.width, record.height),
            truth=truth,
            answer=answer,
            true_names=tuple(naming(one.desc) for one in truth),
            names=tuple(naming(one.desc) for one in answer.objects),
            crowds=np.arange(len(truth)) >= len(record.objects),
            masks=self.masks,
            absent=None if absent is None else frozenset(map(naming, absent)),
            loose=frozenset(map(naming, record.metadata.get(NOT_EXHAUSTIVE, ()))),
            known=self.known,
        )


def scored_images(
    records: Sequence[Record], answers: Sequence[ReadAnswer], naming: Naming = exact
) -> list[ScoredImage]:
    """Return records with their answers, all compared alike."""
    comparison = Comparison.from_records(records, naming)
    return [comparison.image(record, answer) for record, answer in zip(records, answers, strict=True)]


def _crowds(record: Record) -> list[GTObject]:
    """Return the crowd regions. Raises ConfigError for an invalid one."""
    found = []
    for number, region in enumerate(record.metadata.get(CROWDS, ())):
        try:
            found.append(read_object(region, Measure("pixels", (record.width, record.height))))
        except InvalidObject as error:
            path = f"{record.sample_id} metadata.{CROWDS}[{number}]{error.problem.path}"
            raise ConfigError([replace(error.problem, path=path)]) from error
    return found


def _names_in(record: Record) -> list[str]:
    return [
        *(one.desc for one in record.objects),
        *record.metadata.get(NEGATIVE, ()),
        *record.metadata.get(NOT_EXHAUSTIVE, ()),
    ]


def _shape(one: GTObject, size: tuple[int, int], *, masks: bool) -> Any:
    """Return what COCO compares: [x, y, width, height] in pixels, or a run-length mask of the image's size."""
    if isinstance(one, MeasuredObject):
        left, top, width, height = one.box
        right, bottom = left + width, top + height
        points = np.array([(left, top), (right, bottom)])
    else:
        points = np.asarray(one.bins, dtype=np.float64).reshape(-1, 2) * size / BINS
        (left, top), (right, bottom) = points.min(0), points.max(0)
    if not masks:
        return [*one.box] if isinstance(one, MeasuredObject) else [left, top, right - left, bottom - top]
    if isinstance(one, MeasuredObject) and one.mask is not None:
        return {"size": [size[1], size[0]], "counts": one.mask}
    corners = [left, top, right, top, right, bottom, left, bottom]
    return _drawn(corners if len(points) == 2 else points.ravel().tolist(), size)


def _drawn(outline: Sequence[float], size: tuple[int, int]) -> Any:
    """Return the mask of an outline, x and y in turn; points outside of the image are moved to its edge."""
    inside = [min(max(value, 0.0), size[place % 2]) for place, value in enumerate(outline)]
    return rle.frPyObjects([inside], size[1], size[0])[0]


def _iou(answered: Sequence[Any], true: Sequence[Any], crowds: BoolArray) -> FloatArray:
    if not answered or not true:
        return np.zeros((len(answered), len(true)))
    if isinstance(true[0], dict):
        return np.asarray(rle.iou(list(answered), list(true), crowds.astype(np.uint8)))
    return np.asarray(rle.iou(np.asarray(answered), np.asarray(true), crowds.astype(np.uint8)))


def _areas(shapes: Sequence[Any]) -> FloatArray:
    if shapes and isinstance(shapes[0], dict):
        return np.asarray(rle.area(list(shapes)), dtype=np.float64)
    sides = np.asarray(shapes, dtype=np.float64).reshape(-1, 4)
    found: FloatArray = sides[:, 2] * sides[:, 3]
    return found
