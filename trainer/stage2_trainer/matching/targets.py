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
    prefix_coord_pos, prefix_coord_target_bins: positions of coordinates of supervised objects, and their targets.
    tail_ignore_pos: positions in the tail (0 = its first token) without a loss: inside a description, unless these
    are trained.
    tail_coord_pos, tail_coord_bins: positions of coordinates in the tail, and their bins.
    weights: (position, factor of the loss); a negative factor penalises the token.
    text_labels: (position, id) of the answer's own text of supervised objects.
    parsed, ground_truth, matching: the inputs; `matching.pairs[i].pred` is an index into `parsed.valid_objects`.
    repeated, dropped: valid objects that were removed as duplicates, and as unmatched. penalised: those that stay
    without a match, and are trained against.
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
    penalised: tuple[int, ...] = ()
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
        """Indices of the true objects that the answer did not find, in the record's order."""
        return self.matching.false_negatives

    @property
    def appended(self) -> tuple[int, ...]:
        """Indices of the true objects in the tail: those that no object of the answer matches or follows."""
        return self.matching.missed

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
        valid, matched = len(self.parsed.valid_objects), len(self.matching.pairs)
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
            # transport in log space cannot fail, so every match is supervised
            "matched_for_supervision": matched,
            "excluded_from_supervision": 0,
            "following": len(self.matching.following),
            "matched_maskiou_sum": sum(pair.iou for pair in self.matching.pairs),
            "matched_maskiou_count": matched,
            "fp_count": valid - matched,
            "fn_count": len(self.ground_truth.objects) - matched,
            "fn_appended": len(self.appended),
            "gating_rejections": self.matching.gating_rejections,
            "candidates": self.matching.candidates,
            "prefix_coord_targets": len(self.prefix_coord_pos),
            "prefix_len": self.prefix_len,
            "append_len": self.train_len - self.prefix_len,
            "train_len": self.train_len,
            "tail_ignored": len(self.tail_ignore_pos),
            "duplicates_removed": len(self.repeated),
            "unmatched_dropped": len(self.dropped),
            "unmatched_penalised": len(self.penalised),
        }


def build_target(
    response_ids: Sequence[int], gt: GroundTruth, vocab: CoordVocab, options: MatchOptions = DEFAULTS
) -> MatchedTarget:
    """Turn an answer's ids and its record's ground truth into a supervised target. Never raises for any ids."""
    parsed = parse_rollout(response_ids, vocab)
    pred = parsed.valid_objects
    repeated = duplicates(pred, options.duplicate_iou)
    matching = match_except(pred, gt.objects, repeated, options)
    bins = target_bins([(pred[pair.pred], gt.objects[pair.gt]) for pair in matching.pairs], options)
    targets = {pair.pred: one for pair, one in zip(matching.pairs, bins, strict=True)}
    if options.assignment == "dynamic":
        matching, followed = follow(pred, gt.objects, matching, repeated)
        targets |= followed
    supervised = matching.supervised
    unmatched = tuple(i for i in matching.unmatched if i not in repeated)
    dropped = unmatched if options.unmatched_objects == "dropped" else ()
    laid_out = lay_out(parsed, gt, matching, (*repeated, *dropped), vocab, options)
    positions = [laid_out.moved[token] for pair in supervised for token in pred[pair.pred].token_positions]
    start, weight = laid_out.prefix_len, options.missed_desc_weight
    tail = list(laid_out.ids[start:])
    described, coord_pos, coord_bins = read_tail(tail, vocab)
    # a coordinate token within a description is not a coordinate
    named = [at for at in described if weight and vocab.bin_of(tail[at]) is None]
    penalised = unmatched if options.unmatched_objects == "penalised" else ()
    text_labels = _text_labels(parsed, gt, matching, laid_out, vocab) if options.matched_text_weight else {}
    weights = dict.fromkeys(text_labels, options.matched_text_weight) if options.matched_text_weight != 1 else {}
    weights |= {start + at: weight for at in named} if weight != 1 else {}
    weights |= dict.fromkeys([laid_out.begun[i] for i in penalised], -options.unmatched_weight)
    return MatchedTarget(
        parsed=parsed,
        ground_truth=gt,
        matching=matching,
        y_train_ids=laid_out.ids,
        prefix_len=start,
        prefix_text=laid_out.texts[0],
        append_text=laid_out.texts[1],
        prefix_coord_pos=tuple(positions),
        prefix_coord_target_bins=tuple(one for pair in supervised for one in targets[pair.pred]),
        tail_ignore_pos=tuple(sorted({*described} - {*named})),
        tail_coord_pos=coord_pos,
        tail_coord_bins=coord_bins,
        weights=tuple(sorted(weights.items())),
        repeated=repeated,
        dropped=dropped,
        penalised=penalised,
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


def _text_labels(
    parsed: ParsedRollout, gt: GroundTruth, matching: Matching, laid_out: LaidOut, vocab: CoordVocab
) -> dict[int, int]:
    """Return the labels of the answer's own text of supervised objects, by position in `Y_train`.

    A token belongs to the object in whose stretch it ends; the stretch begins behind the object before. It is its own
    label, but in a wrong description: there the true one's tokens are, if they are as many, and else nothing.
    Only tokens that the model generated are labelled.
    """
    aligned, ids = vocab.align(list(parsed.prefix_ids)), parsed.prefix_ids
    ends, begins = aligned.starts[1:], parsed.ends_before
    labels: dict[int, int] = {}
    for pair in matching.supervised:
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
