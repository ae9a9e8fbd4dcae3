"""From the token ids of an answer to its objects and to the longest prefix of it that training can continue.

Only a suffix is ever cut off; tokens that stay are the rollout's own, except for at most one that a cut splits. No
sequence of ids makes it raise: whatever cannot be used is dropped, counted and named. Source: semantics, section 4.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stage2_trainer.matching.parsed_objects import ParsedObject, loads, read_objects
from stage2_trainer.matching.scan import Scan, scan
from stage2_trainer.matching.tokens import REPLACEMENT, Alignment, CoordVocab, as_ids

END_OF_TURN = "<|im_end|>"

# What happened to the answer as a whole.
NO_JSON = "no_json"
TEXT_BEFORE_JSON = "text_before_json"
CUT_MOVED = "cut_moved_to_earlier_object"
UNKNOWN_ID = "id_outside_vocabulary"
TEXT_AFTER_JSON = "text_after_json"


@dataclass(frozen=True)
class ParsedRollout:
    """An answer, parsed.

    prefix_ids / prefix_text: what is kept; it ends in `{` or in the `}` of an object, never in the closing brace of the
    whole. objects: every `object_n` seen, in order of appearance.
    truncated: the answer stopped before it was closed.
    clean: the prefix, closed by one `}`, is JSON.
    max_object_index: greatest n of any `object_n` key in the prefix, valid or not; None without one.
    dropped: number of dropped objects by reason; notes: what happened to the answer as a whole.
    text: the whole answer up to its end of turn.
    """

    prefix_ids: tuple[int, ...]
    prefix_text: str
    objects: tuple[ParsedObject, ...]
    truncated: bool
    clean: bool
    max_object_index: int | None
    dropped: dict[str, int]
    notes: tuple[str, ...]
    text: str

    @property
    def valid_objects(self) -> tuple[ParsedObject, ...]:
        """The objects that can be matched."""
        return tuple(found for found in self.objects if found.valid)

    @property
    def dropped_invalid(self) -> int:
        """The number of dropped objects."""
        return sum(self.dropped.values())


def parse_rollout(response_ids: Sequence[int], vocab: CoordVocab) -> ParsedRollout:
    """Parse the ids that a server returned (stop tokens may still be there). Linear in time; never raises."""
    ids, unknown = _known_ids(as_ids(response_ids), vocab)
    aligned = vocab.align(ids)
    end = aligned.text.find(END_OF_TURN)
    text = aligned.text if end < 0 else aligned.text[:end]
    found = scan(text)
    before = found.first_open > 0 and bool(text[: found.first_open - 1].strip())
    notes = _notes(text, found, unknown=unknown, before=before)
    prefix, cut = _prefix(ids, aligned, [] if before else _cuts(found), vocab)
    if cut < max(_cuts(found), default=0) and not before:
        notes = (*notes, CUT_MOVED)
    objects = read_objects(ids, aligned, found, text, cut, vocab)
    kept = [entry.index for entry in found.entries if entry.key_start < cut]
    prefix_text = text[:cut] if cut else "{"
    return ParsedRollout(
        prefix_ids=tuple(prefix),
        prefix_text=prefix_text,
        objects=objects,
        truncated=found.truncated,
        clean=_is_json(prefix_text + "}"),
        max_object_index=max(kept, default=None),
        dropped=dict(Counter(one.reason for one in objects if one.reason)),
        notes=notes,
        text=text,
    )


def object_ends(response_ids: Sequence[int], vocab: CoordVocab) -> tuple[int, ...]:
    """Return after how many tokens each object of an answer is closed, in order."""
    ids, _ = _known_ids(as_ids(response_ids), vocab)
    aligned = vocab.align(ids)
    end = aligned.text.find(END_OF_TURN)
    found = scan(aligned.text if end < 0 else aligned.text[:end])
    ends = [entry.value_end for entry in found.entries if entry.value_end >= 0]
    return tuple(aligned.token_at(end - 1) + 1 for end in ends)


def _known_ids(ids: list[int], vocab: CoordVocab) -> tuple[list[int], bool]:
    """Return the ids up to the first that the vocabulary lacks: it spells nothing, and no model can be fed with it."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab.size):
        return ids, False
    return ids[: next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab.size)], True


def _notes(text: str, found: Scan, *, unknown: bool, before: bool) -> tuple[str, ...]:
    after = found.closed_at >= 0 and bool(text[found.closed_at :].strip())
    happened = {
        UNKNOWN_ID: unknown,
        NO_JSON: found.first_open < 0,
        TEXT_BEFORE_JSON: before,
        TEXT_AFTER_JSON: after,
    }
    return tuple(note for note, true in happened.items() if true)


def _cuts(found: Scan) -> list[int]:
    """Return the characters where the prefix may end, best first: after the last closed object, ..., the first `{`."""
    if found.first_open < 0:
        return []
    return [*reversed([entry.value_end for entry in found.entries if entry.value_end >= 0]), found.first_open]


def _prefix(ids: list[int], aligned: Alignment, cuts: list[int], vocab: CoordVocab) -> tuple[list[int], int]:
    """Return the ids up to the first cut that ids can spell, and that cut; without one the ids of `{`, and 0."""
    for cut in cuts:
        kept = _cut_ids(ids, aligned, cut, vocab)
        if kept is not None:
            return kept, cut
    return vocab.encode("{"), 0


def _cut_ids(ids: list[int], aligned: Alignment, cut: int, vocab: CoordVocab) -> list[int] | None:
    """Return the ids that spell exactly `text[:cut]`, at most the last one replaced; None if there are none."""
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
