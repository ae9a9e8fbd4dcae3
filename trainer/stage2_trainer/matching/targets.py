"""The training target of one answer: parse, match, compute coordinate targets, append missed objects.

By default the prefix is supervised only at matched coordinates; the appended tail has cross entropy on its structure
and the losses of coordinates. Options remove, penalise or reweight objects, supervise the text of matched ones, and
let boxes without a match follow a true one. Source: semantics, sections 4.2 to 4.6, 20.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stage2_trainer.matching.assign import DEFAULTS, Matching, MatchOptions, duplicates, follow, match_except
from stage2_trainer.matching.ground_truth import GroundTruth, desc_value_spans, serialize_objects
from stage2_trainer.matching.layout import LaidOut, lay_out
from stage2_trainer.matching.parse import ParsedRollout, desc_span, parse_rollout
from stage2_trainer.matching.sinkhorn import target_bins
from stage2_trainer.matching.tokens import Alignment, BoolArray, CoordVocab, IntArray

TokenLabel = Literal["none", "ce", "coord", "penalised"]


@dataclass(frozen=True)
class MatchedTarget:
    """`Y_train` of one answer, and its supervision.

    y_train_ids: prefix, then the appended tail; the template's end of turn follows.
    prefix_len: tokens of the prefix. prefix_text, append_text: the texts of prefix and tail. The prefix is the answer's
    own unless objects were removed; the tail begins with the first missed object, or with the closing brace.
    prefix_coord_pos, prefix_coord_target_bins: positions of matched coordinates, and their targets.
    tail_ignore_pos: positions in the tail (0 = its first token) without a loss: inside a description (unless these
    are trained), or in the answer's own objects after a missed one.
    tail_coord_pos, tail_coord_bins: positions of taught coordinates in the tail, and their bins.
    weights: (position, factor of the loss); a negative factor penalises the token.
    coord_weights: the same for coordinates. text_labels: (position, id) of the answer's own text of matched objects.
    parsed, ground_truth, matching: the inputs; `matching.pairs[i].pred` is an index into `parsed.valid_objects`.
    repeated, dropped: valid objects that were removed as duplicates, and as unmatched.
    recovered: missed ground-truth objects that a further answer found.
    """

    parsed: ParsedRollout
    ground_truth: GroundTruth
    matching: Matching
    y_train_ids: tuple[int, ...]
    prefix_len: int
    prefix_text: str
    append_text: str
    prefix_coord_pos: tuple[int, ...]
    prefix_coord_target_bins: tuple[int, ...]
    tail_ignore_pos: tuple[int, ...]
    tail_coord_pos: tuple[int, ...]
    tail_coord_bins: tuple[int, ...]
    weights: tuple[tuple[int, float], ...] = ()
    repeated: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    coord_weights: tuple[tuple[int, float], ...] = ()
    recovered: tuple[int, ...] = ()
    text_labels: tuple[tuple[int, int], ...] = ()

    @property
    def train_len(self) -> int:
        """Tokens of `y_train_ids`."""
        return len(self.y_train_ids)

    @property
    def y_train_text(self) -> str:
        """The text of `y_train_ids`; JSON whenever `parsed.clean`."""
        return self.prefix_text + self.append_text

    @property
    def false_negatives(self) -> tuple[int, ...]:
        """Indices of the true objects that the answer missed, in the record's order."""
        return self.matching.false_negatives

    @property
    def coord_targets(self) -> dict[int, int]:
        """The target bin of each supervised coordinate, by position in `y_train_ids`."""
        tail = (self.prefix_len + position for position in self.tail_coord_pos)
        return {
            **dict(zip(self.prefix_coord_pos, self.prefix_coord_target_bins, strict=True)),
            **dict(zip(tail, self.tail_coord_bins, strict=True)),
        }

    @property
    def labels(self) -> tuple[TokenLabel, ...]:
        """The supervision of each token of `y_train_ids`: none, its own id (`ce`), a bin (`coord`), or `penalised`."""
        silent = {self.prefix_len + position for position in self.tail_ignore_pos}
        labels: dict[int, TokenLabel] = dict.fromkeys(self.penalised_pos, "penalised")
        labels |= dict.fromkeys([position for position, _ in self.text_labels], "ce")
        labels |= dict.fromkeys(self.coord_targets, "coord")
        return tuple(
            labels.get(i, "none" if i < self.prefix_len or i in silent else "ce") for i in range(self.train_len)
        )

    @property
    def penalised_pos(self) -> tuple[int, ...]:
        """Positions of penalised tokens."""
        return tuple(position for position, weight in self.weights if weight < 0)

    @property
    def counters(self) -> dict[str, float]:
        """Counts and sums of this answer for the training log; names as in semantics, sections 4.6 and 14."""
        valid, supervised = len(self.parsed.valid_objects), len(self.matching.pairs)
        near = [pair for k, pair in enumerate(self.matching.pairs) if k not in self.matching.far]
        matched = len(near)
        return {
            "parse_dropped_invalid": self.parsed.dropped_invalid,
            "parse_truncated": int(self.parsed.truncated),
            "parse_clean": int(self.parsed.clean),
            "parse_text_before_json": int("text_before_json" in self.parsed.notes),
            "parse_obj_total": len(self.parsed.objects),
            "valid_pred_objects": valid,
            "gt_objects": len(self.ground_truth.objects),
            "gt_dropped": len(self.ground_truth.dropped),
            "matched_pairs": matched,
            "matched_for_supervision": supervised,
            # transport in log space cannot fail, so every match is supervised
            "excluded_from_supervision": 0,
            "matched_maskiou_sum": sum(pair.iou for pair in near),
            "matched_maskiou_count": matched,
            "fp_count": valid - matched,
            "fn_count": len(self.ground_truth.objects) - matched,
            "gating_rejections": self.matching.gating_rejections,
            "candidates": self.matching.candidates,
            "prefix_coord_targets": len(self.prefix_coord_pos),
            "prefix_len": self.prefix_len,
            "append_len": self.train_len - self.prefix_len,
            "train_len": self.train_len,
            "tail_ignored": len(self.tail_ignore_pos),
            "duplicates_removed": len(self.repeated),
            "unmatched_dropped": len(self.dropped),
            "unmatched_penalised": len(self.penalised_pos),
            "misses_recovered": len(self.recovered),
        }


def build_target(
    response_ids: Sequence[int],
    gt: GroundTruth,
    vocab: CoordVocab,
    options: MatchOptions = DEFAULTS,
    *,
    further: Sequence[Sequence[int]] = (),
) -> MatchedTarget:
    """Turn an answer's ids and its record's ground truth into a supervised target. Never raises for any ids.

    further: ids of further answers to the prompt; they only show which missed objects the model can find.
    """
    parsed = parse_rollout(response_ids, vocab)
    pred = parsed.valid_objects
    repeated = duplicates(pred, options.duplicate_iou)
    matching = match_except(pred, gt.objects, repeated, options)
    bins = target_bins([(pred[pair.pred], gt.objects[pair.gt]) for pair in matching.pairs], options)
    targets = {pair.pred: one for pair, one in zip(matching.pairs, bins, strict=True)}
    if options.assignment == "dynamic":
        matching, followed = follow(pred, gt.objects, matching, repeated)
        targets |= followed
    unmatched = tuple(i for i in matching.false_positives if i not in repeated)
    dropped = unmatched if options.unmatched_objects == "dropped" else ()
    laid_out = lay_out(parsed, gt, matching, (*repeated, *dropped), vocab, options)
    positions = [laid_out.moved[token] for pair in matching.pairs for token in pred[pair.pred].token_positions]
    recovered = recovered_misses(further, gt, matching.false_negatives, vocab, options)
    tail = _read_tail(laid_out, vocab, options, recovered)
    penalised = [laid_out.begun[i] for i in unmatched] if options.unmatched_objects == "penalised" else []
    text_labels = _text_labels(parsed, gt, matching, laid_out, vocab) if options.matched_text_weight else {}
    weights = dict.fromkeys(text_labels, options.matched_text_weight) if options.matched_text_weight != 1 else {}
    weights |= tail.weights | dict.fromkeys(penalised, -options.unmatched_weight)
    return MatchedTarget(
        parsed=parsed,
        ground_truth=gt,
        matching=matching,
        y_train_ids=laid_out.ids,
        prefix_len=laid_out.prefix_len,
        prefix_text=laid_out.texts[0],
        append_text=laid_out.texts[1],
        prefix_coord_pos=tuple(positions),
        prefix_coord_target_bins=tuple(one for pair in matching.pairs for one in targets[pair.pred]),
        tail_ignore_pos=tail.ignored,
        tail_coord_pos=tail.coord_pos,
        tail_coord_bins=tail.coord_bins,
        weights=tuple(sorted(weights.items())),
        repeated=repeated,
        dropped=dropped,
        coord_weights=tail.coord_weights,
        recovered=recovered,
        text_labels=tuple(sorted(text_labels.items())),
    )


def ground_truth_target(gt: GroundTruth, vocab: CoordVocab) -> MatchedTarget:
    """Return the whole ground truth as a tail without a prefix: structure and descriptions have cross entropy.

    A coordinate token within a description is not trained on.
    """
    text = serialize_objects(gt.objects)
    tail = vocab.encode(text)
    described, coord_pos, coord_bins = read_tail(tail, vocab)
    return MatchedTarget(
        parsed=ParsedRollout(),
        ground_truth=gt,
        matching=Matching((), (), tuple(range(len(gt.objects))), 0, 0),
        y_train_ids=tuple(tail),
        prefix_len=0,
        prefix_text="",
        append_text=text,
        prefix_coord_pos=(),
        prefix_coord_target_bins=(),
        tail_ignore_pos=tuple(at for at in described if vocab.bin_of(tail[at]) is not None),
        tail_coord_pos=coord_pos,
        tail_coord_bins=coord_bins,
    )


@dataclass(frozen=True)
class _Tail:
    """The supervision of a tail, as in `MatchedTarget`."""

    ignored: tuple[int, ...]
    coord_pos: tuple[int, ...]
    coord_bins: tuple[int, ...]
    weights: dict[int, float]
    coord_weights: tuple[tuple[int, float], ...]


def _read_tail(laid_out: LaidOut, vocab: CoordVocab, options: MatchOptions, recovered: Sequence[int]) -> _Tail:
    """Return the supervision of a tail: inserted text is taught, the answer's own text between is not."""
    start, weight = laid_out.prefix_len, options.missed_desc_weight
    silent = set(range(len(laid_out.ids) - start))
    coords: dict[int, int] = {}
    named: list[int] = []
    for at, ids in laid_out.taught:
        described, coord_pos, coord_bins = read_tail(ids, vocab)
        # a coordinate token within a description is not a coordinate
        shown = [one for one in described if weight and vocab.bin_of(ids[one]) is None]
        named += [at + one for one in shown]
        silent -= {at - start + one for one in {*range(len(ids))} - {*described} | {*shown}}
        coords |= {at - start + position: found for position, found in zip(coord_pos, coord_bins, strict=True)}
    weights = dict.fromkeys(named, weight) if weight != 1 else {}
    more = [at for at in _recovered_tokens(laid_out, vocab, recovered) if at - start not in silent]
    words = [at for at in more if at - start not in coords]
    weights |= {at: weights.get(at, 1.0) * options.recovery_weight for at in words}
    placed = tuple((at, options.recovery_weight) for at in more if at - start in coords)
    return _Tail(tuple(sorted(silent)), tuple(coords), tuple(coords.values()), weights, placed)


def _text_labels(
    parsed: ParsedRollout, gt: GroundTruth, matching: Matching, laid_out: LaidOut, vocab: CoordVocab
) -> dict[int, int]:
    """Return the labels of the answer's own text of matched objects, by position in `Y_train`.

    A token belongs to the object in whose stretch it ends; the stretch begins behind the object before. It is its own
    label, but in a wrong description: there the true one's tokens are, if they are as many, and else nothing.
    Only tokens that the model generated are labelled.
    """
    aligned, ids = vocab.align(list(parsed.prefix_ids)), parsed.prefix_ids
    ends, begins = aligned.starts[1:], parsed.ends_before
    labels: dict[int, int] = {}
    for pair in matching.pairs:
        one, true = parsed.valid_objects[pair.pred], gt.objects[pair.gt]
        first, last = one.span
        low, high = np.searchsorted(ends, [begins[pair.pred], last], side="right").tolist()
        start, end = desc_span(aligned.text[first:last])
        named = described_tokens(aligned, [(first + start, first + end)])
        mine = range(low, min(high, parsed.own_len))
        own = [at for at in mine if at in laid_out.moved and vocab.bin_of(ids[at]) is None]
        labels |= {laid_out.moved[at]: ids[at] for at in own if not named[at]}
        words = [at for at in own if named[at]]
        wanted = [ids[at] for at in words]
        if one.desc != true.desc:
            name = json.dumps(true.desc, ensure_ascii=False)[1:-1]
            inserted = vocab.encode(aligned.text[first : first + start] + name + aligned.text[first + end : last])
            inside = described_tokens(vocab.align(inserted), [(start, start + len(name))])
            wanted = [token for token, in_name in zip(inserted, inside, strict=True) if in_name]
        if one.desc == true.desc or len(wanted) == len(words) == np.count_nonzero(named):
            labels |= {laid_out.moved[at]: token for at, token in zip(words, wanted, strict=True)}
    return labels


def _recovered_tokens(laid_out: LaidOut, vocab: CoordVocab, recovered: Sequence[int]) -> list[int]:
    """Return the positions of the entries of recovered objects."""
    if not recovered:
        return []
    entries = [[at + token for token in one] for at, ids in laid_out.taught for one in entry_tokens(ids, vocab)]
    return [at for missed, tokens in zip(laid_out.missed, entries, strict=True) if missed in recovered for at in tokens]


def read_tail(tail: list[int], vocab: CoordVocab) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the positions inside descriptions, the positions of coordinates, and their bins.

    Descriptions are found in the text that the tail's own ids spell, so a tokenizer that normalises text cannot shift
    them.
    """
    aligned = vocab.align(tail)
    inside = described_tokens(aligned, desc_value_spans(aligned.text))
    bins: IntArray = vocab.bins_of(np.asarray(tail, dtype=np.int64))
    coords = np.flatnonzero((bins >= 0) & ~inside)
    return tuple(np.flatnonzero(inside).tolist()), tuple(coords.tolist()), tuple(bins[coords].tolist())


def described_tokens(aligned: Alignment, spans: Sequence[tuple[int, int]]) -> BoolArray:
    """Return which tokens reach into these stretches of text (characters, end exclusive)."""
    starts, ends = aligned.starts[:-1], aligned.starts[1:].copy()
    # a token that ends inside a character reaches into the next one
    ends[list(aligned.split)] += 1
    inside = np.zeros(len(starts), dtype=np.bool_)
    for first, last in spans:
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(starts, last, side="left")
        inside[low:high] = True
    return inside


def entry_tokens(ids: Sequence[int], vocab: CoordVocab) -> list[range]:
    """Return the tokens of each entry `"object_n": {...}` of an inserted text, in order.

    What leads to an entry belongs to it, and the answer's closing brace to none. A token belongs to the entry in which
    it begins.
    """
    aligned = vocab.align(list(ids))
    starts, begin, found = aligned.starts[:-1], 0, []
    for _, named in desc_value_spans(aligned.text):
        # geometry has no braces; the last token may belong to what follows
        end = aligned.text.find("}", named) + 1 or len(aligned.text)
        low, high = np.searchsorted(starts, [begin, end], side="left").tolist()
        found.append(range(low, high))
        begin = end
    return found


def recovered_misses(
    answers: Sequence[Sequence[int]], gt: GroundTruth, missed: Sequence[int], vocab: CoordVocab, options: MatchOptions
) -> tuple[int, ...]:
    """Return the missed true objects that at least one of these answers has, matched like the first answer.

    answers: token ids. missed: indices into `gt.objects`; the result keeps their order.
    """
    found: set[int] = set()
    for ids in answers:
        if found.issuperset(missed):
            break
        objects = parse_rollout(ids, vocab).valid_objects
        matching = match_except(objects, gt.objects, duplicates(objects, options.duplicate_iou), options)
        found.update(pair.gt for pair in matching.pairs)
    return tuple(one for one in missed if one in found)
