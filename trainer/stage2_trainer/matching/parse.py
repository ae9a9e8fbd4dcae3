"""Parses an answer's token ids into objects and the longest prefix that training can continue.

Only a suffix is ever cut off. The remaining tokens are the rollout's own, except for at most one that the cut splits.
Parsing never raises: whatever cannot be used is dropped, counted and named. Source: semantics, section 4.2.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from operator import eq
from typing import Any, Literal, cast

import numpy as np

from stage2_api.coordinates import coord_bin
from stage2_trainer.matching.scan import GEOMETRY_KEYS, INSIDE_STRING, WHITE_SPACE, Entry, Scan, scan
from stage2_trainer.matching.tokens import REPLACEMENT, Alignment, CoordVocab

Kind = Literal["bbox", "poly"]
KIND_OF_KEY: dict[str, Kind] = {"bbox_2d": "bbox", "poly": "poly"}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Python's own reader takes NaN and Infinity.
_JSON = json.JSONDecoder(parse_constant=_refuse)
# A string, and the one that is its value if it is a key with one.
_STRINGS = re.compile(rf'"({INSIDE_STRING})"(?:\s*:\s*"({INSIDE_STRING})")?', re.DOTALL)

# Why an object was dropped.
CUT_OFF = "cut_off"
NO_OBJECT_VALUE = "value_is_no_object"
NOT_JSON = "not_json"
BLANK_DESC = "desc_missing_or_blank"
NOT_ONE_GEOMETRY = "not_exactly_one_geometry"
UNKNOWN_KEY = "unknown_key"
NOT_COORD_TOKENS = "coordinates_are_no_coord_tokens"
WRONG_COUNT = "wrong_number_of_coordinates"
TOKENS_DIFFER = "coord_tokens_differ_from_text"
OUTSIDE_PREFIX = "outside_prefix"

END_OF_TURN = "<|im_end|>"

# Notes on the answer as a whole.
NO_JSON = "no_json"
TEXT_BEFORE_JSON = "text_before_json"
CUT_MOVED = "cut_moved_to_earlier_object"
UNKNOWN_ID = "id_outside_vocabulary"
TEXT_AFTER_JSON = "text_after_json"


@dataclass(frozen=True, slots=True)
class ParsedObject:
    """One `object_n` of the answer.

    valid: whether it can be matched; then it has `desc`, `kind` and `bins` (4 for a bbox, x and y in turn for a poly).
    token_positions: of the bins, in the prefix. reason: why it is invalid. in_prefix: whether it stays in the prefix;
    an invalid one is unsupervised there. span: of its value in the answer's text (characters, end exclusive; -1:
    missing).
    """

    key: str
    index: int
    valid: bool
    reason: str | None
    in_prefix: bool
    desc: str
    kind: Kind | None
    bins: tuple[int, ...]
    token_positions: tuple[int, ...]
    span: tuple[int, int]


@dataclass(frozen=True)
class ParsedRollout:
    """An answer, parsed; the defaults stand for no answer.

    prefix_ids, prefix_text: the kept prefix. It ends in `{` or in the `}` of an object, never in the answer's closing
    brace. own_len: its tokens that the model generated, without those that the cut put in the place of one.
    objects: every `object_n`, in order of appearance.
    truncated: whether the answer stopped before it was closed.
    clean: whether the prefix, closed by one `}`, is JSON.
    max_object_index: greatest n of any `object_n` key in the prefix, valid or not; None without one.
    dropped: number of dropped objects by reason. notes: on the answer as a whole.
    text: the whole answer up to its end of turn.
    """

    prefix_ids: tuple[int, ...] = ()
    prefix_text: str = ""
    own_len: int = 0
    objects: tuple[ParsedObject, ...] = ()
    truncated: bool = False
    clean: bool = True
    max_object_index: int | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str = ""

    @property
    def valid_objects(self) -> tuple[ParsedObject, ...]:
        """The objects that can be matched."""
        return tuple(found for found in self.objects if found.valid)

    @property
    def ends_before(self) -> tuple[int, ...]:
        """The end of the value before each valid object, where the model chose to continue; else the first `{`'s."""
        ends, end = [], self.prefix_text.index("{") + 1
        for one in self.objects:
            ends += [end] if one.valid else []
            end = one.span[1] if one.in_prefix and one.span[1] >= 0 else end
        return tuple(ends)

    @property
    def dropped_invalid(self) -> int:
        """The number of dropped objects."""
        return sum(self.dropped.values())


def parse_rollout(response_ids: Sequence[int], vocab: CoordVocab) -> ParsedRollout:
    """Parse the ids that a server returned, with or without stop tokens. Linear in time; never raises."""
    ids, unknown = _known_ids(list(map(int, response_ids)), vocab)
    aligned = vocab.align(ids)
    end = aligned.text.find(END_OF_TURN)
    text = aligned.text if end < 0 else aligned.text[:end]
    found = scan(text)
    before = found.first_open > 0 and bool(text[: found.first_open - 1].strip(WHITE_SPACE))
    notes = _notes(text, found, unknown=unknown, before=before)
    prefix, cut = _prefix(ids, aligned, [] if before else _cuts(found), vocab)
    if cut < max(_cuts(found), default=0) and not before:
        notes = (*notes, CUT_MOVED)
    objects = _ObjectReader(ids, aligned, text, cut, vocab).read(found)
    kept = [entry.index for entry in found.entries if entry.key_start < cut]
    prefix_text = text[:cut] if cut else "{"
    return ParsedRollout(
        prefix_ids=tuple(prefix),
        prefix_text=prefix_text,
        own_len=sum(takewhile(bool, map(eq, prefix, ids))),
        objects=objects,
        truncated=found.truncated,
        clean=_is_json(prefix_text + "}"),
        max_object_index=max(kept, default=None),
        dropped=dict(Counter(one.reason for one in objects if one.reason)),
        notes=notes,
        text=text,
    )


def object_ends(response_ids: Sequence[int], vocab: CoordVocab) -> tuple[int, ...]:
    """Return the number of tokens after which each object of an answer is closed, in order."""
    ids, _ = _known_ids(list(map(int, response_ids)), vocab)
    aligned = vocab.align(ids)
    end = aligned.text.find(END_OF_TURN)
    found = scan(aligned.text if end < 0 else aligned.text[:end])
    ends = [entry.value_end for entry in found.entries if entry.value_end >= 0]
    return tuple(aligned.token_at(end - 1) + 1 for end in ends)


def _known_ids(ids: list[int], vocab: CoordVocab) -> tuple[list[int], bool]:
    """Return the ids before the first one outside the vocabulary, which no model can take, and whether there is one."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab.size):
        return ids, False
    return ids[: next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab.size)], True


def _notes(text: str, found: Scan, *, unknown: bool, before: bool) -> tuple[str, ...]:
    after = found.closed_at >= 0 and bool(text[found.closed_at :].strip(WHITE_SPACE))
    happened = {UNKNOWN_ID: unknown, NO_JSON: found.first_open < 0, TEXT_BEFORE_JSON: before, TEXT_AFTER_JSON: after}
    return tuple(note for note, true in happened.items() if true)


def _cuts(found: Scan) -> list[int]:
    """Return the offsets at which the prefix may end, best first: after the last closed object, ..., the first `{`."""
    if found.first_open < 0:
        return []
    return [*reversed([entry.value_end for entry in found.entries if entry.value_end >= 0]), found.first_open]


def _prefix(ids: list[int], aligned: Alignment, cuts: list[int], vocab: CoordVocab) -> tuple[list[int], int]:
    """Return the ids up to the first cut that ids can spell, and that cut; without any, the ids of `{` and 0."""
    for cut in cuts:
        kept = _cut_ids(ids, aligned, cut, vocab)
        if kept is not None:
            return kept, cut
    return vocab.encode("{"), 0


def _cut_ids(ids: list[int], aligned: Alignment, cut: int, vocab: CoordVocab) -> list[int] | None:
    """Return ids that spell exactly `text[:cut]`, with at most the last one replaced; None if impossible."""
    token = aligned.token_at(cut - 1)
    wanted = aligned.pieces[token][: cut - int(aligned.starts[token])]
    alone = vocab.decode_piece(ids[token])
    if alone == wanted:
        return ids[: token + 1]
    if token not in aligned.split and wanted == aligned.pieces[token]:
        return ids[: token + 1]
    if not alone.startswith(wanted) or REPLACEMENT in wanted:
        return None
    replacement = vocab.encode(wanted)
    return ids[:token] + replacement if vocab.decode(replacement) == wanted else None


def _is_json(text: str) -> bool:
    return isinstance(loads(text), dict)


class _ObjectReader:
    """Reads and validates the entries of one answer's scan."""

    def __init__(self, ids: list[int], aligned: Alignment, text: str, cut: int, vocab: CoordVocab) -> None:
        bins = vocab.bins_of(np.asarray(ids, dtype=np.int64))
        positions = np.flatnonzero(bins >= 0)
        self._text = text
        self._cut = cut
        self._positions: list[int] = positions.tolist()
        self._bins: list[int] = bins[positions].tolist()
        self._starts: list[int] = aligned.starts[positions].tolist()

    def read(self, found: Scan) -> tuple[ParsedObject, ...]:
        """Return an object for each entry, in order."""
        last = len(found.entries) - 1
        return tuple(
            self._read_entry(entry, cut_off=found.truncated and i == last) for i, entry in enumerate(found.entries)
        )

    def _read_entry(self, entry: Entry, *, cut_off: bool) -> ParsedObject:
        if entry.value_end < 0:
            return self._object(entry, CUT_OFF if cut_off else NO_OBJECT_VALUE)
        if entry.value_end > self._cut:
            return self._object(entry, OUTSIDE_PREFIX)
        value = loads(self._text[entry.value_start : entry.value_end])
        reason, key = _check_shape(value)
        if reason:
            return self._object(entry, reason)
        spelled = _bins_of_value(value[key], key)
        positions, captured = self._captured(entry)
        if spelled is None:
            reason = NOT_COORD_TOKENS
        elif not (len(spelled) == 4 if key == "bbox_2d" else len(spelled) >= 6 and len(spelled) % 2 == 0):
            reason = WRONG_COUNT
        elif spelled != captured:
            reason = TOKENS_DIFFER
        return self._object(entry, reason, value["desc"], KIND_OF_KEY[key], captured, positions)

    def _captured(self, entry: Entry) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the positions and bins of the coordinate tokens that begin inside the object's geometry arrays."""
        positions: list[int] = []
        bins: list[int] = []
        for start, end in entry.captures:
            first, last = bisect_left(self._starts, start), bisect_left(self._starts, end)
            positions += self._positions[first:last]
            bins += self._bins[first:last]
        return tuple(positions), tuple(bins)

    def _object(
        self,
        entry: Entry,
        reason: str | None,
        desc: str = "",
        kind: Kind | None = None,
        bins: tuple[int, ...] = (),
        positions: tuple[int, ...] = (),
    ) -> ParsedObject:
        return ParsedObject(
            key=entry.key,
            index=entry.index,
            valid=reason is None,
            reason=reason,
            in_prefix=entry.key_start < self._cut,
            desc=desc,
            kind=kind,
            bins=bins,
            token_positions=positions,
            span=(entry.value_start, entry.value_end),
        )


def _check_shape(value: Any) -> tuple[str | None, str]:
    """Return why an object's value is unusable, apart from its coordinates (None: it is fine), and its geometry key."""
    if not isinstance(value, dict):
        return NOT_JSON, ""
    desc = value.get("desc")
    if not isinstance(desc, str) or not desc.strip():
        return BLANK_DESC, ""
    geometry = [key for key in GEOMETRY_KEYS if key in value]
    if len(geometry) != 1:
        return NOT_ONE_GEOMETRY, ""
    if len(value) != 2:
        return UNKNOWN_KEY, ""
    return None, geometry[0]


def _bins_of_value(value: Any, key: str) -> tuple[int, ...] | None:
    """Return the bins of a geometry value of coordinate-token strings; None for anything else."""
    if not isinstance(value, list):
        return None
    if key == "poly" and value and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        value = list(chain.from_iterable(value))
    bins = [coord_bin(one) if isinstance(one, str) else None for one in value]
    return None if None in bins else tuple(cast("list[int]", bins))


def desc_span(value: str) -> tuple[int, int]:
    """Return where a valid object's value spells its description, without quotes (characters, end exclusive).

    As in `json.loads`, the last of several counts.
    """
    *_, last = (one for one in _STRINGS.finditer(value) if one[2] is not None and loads(f'"{one[1]}"') == "desc")
    return last.span(2)


def loads(text: str) -> Any:
    """Return the JSON value of a text; None if it is not JSON."""
    # an answer may be nested as deep as it is long, which is a RecursionError of the C scanner
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
