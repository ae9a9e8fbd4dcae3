"""The whole E-step of one answer after generation: parse, match, targets, missed objects appended.

Source: semantics, sections 4.2 to 4.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stage2_trainer.matching.assign import Matching, match
from stage2_trainer.matching.ground_truth import GroundTruth
from stage2_trainer.matching.options import DEFAULTS, MatchOptions
from stage2_trainer.matching.parse import ParsedRollout, parse_rollout
from stage2_trainer.matching.serialize import append_text, desc_value_spans
from stage2_trainer.matching.tokens import CoordVocab, IntArray
from stage2_trainer.matching.transport import target_bins

TokenLabel = Literal["none", "ce", "coord"]


@dataclass(frozen=True)
class MatchedTarget:
    """`Y_train` of one answer and where it is supervised.

    y_train_ids: prefix, then the appended tail; the template's end of turn comes after it.
    prefix_len: tokens of the prefix. append_text: the tail's text.
    prefix_coord_pos / prefix_coord_target_bins: positions in the prefix with a matched coordinate, and what it is
    taught. tail_ignore_pos: positions in the tail (0 = its first token) inside a description: no loss there.
    tail_coord_pos / tail_coord_bins: positions in the tail with a coordinate, and its own bin.
    parsed, ground_truth, matching: what it was made from; `matching.pairs[i].pred` counts `parsed.valid_objects`.
    false_negatives: indices of the true objects in the tail, in order.
    """

    parsed: ParsedRollout
    ground_truth: GroundTruth
    matching: Matching
    y_train_ids: tuple[int, ...]
    prefix_len: int
    append_text: str
    prefix_coord_pos: tuple[int, ...]
    prefix_coord_target_bins: tuple[int, ...]
    tail_ignore_pos: tuple[int, ...]
    tail_coord_pos: tuple[int, ...]
    tail_coord_bins: tuple[int, ...]

    @property
    def train_len(self) -> int:
        """Tokens of `y_train_ids`."""
        return len(self.y_train_ids)

    @property
    def y_train_text(self) -> str:
        """The text of `y_train_ids`; JSON whenever `parsed.clean`."""
        return self.parsed.prefix_text + self.append_text

    @property
    def false_negatives(self) -> tuple[int, ...]:
        """Indices of the true objects that the answer missed, in the order in which the tail lists them."""
        return self.matching.false_negatives

    @property
    def coord_targets(self) -> dict[int, int]:
        """Bin that each supervised coordinate is taught, by position in `y_train_ids`."""
        tail = (self.prefix_len + position for position in self.tail_coord_pos)
        return {
            **dict(zip(self.prefix_coord_pos, self.prefix_coord_target_bins, strict=True)),
            **dict(zip(tail, self.tail_coord_bins, strict=True)),
        }

    @property
    def labels(self) -> tuple[TokenLabel, ...]:
        """The supervision of each token of `y_train_ids`: none, its own id (`ce`), or a bin (`coord`)."""
        silent = {self.prefix_len + position for position in self.tail_ignore_pos}
        coords = self.coord_targets
        return tuple(
            "coord" if i in coords else "none" if i < self.prefix_len or i in silent else "ce"
            for i in range(self.train_len)
        )

    @property
    def counters(self) -> dict[str, float]:
        """Counts and sums of this answer for the training log; names as in semantics, sections 4.6 and 14."""
        valid = len(self.parsed.valid_objects)
        matched = len(self.matching.pairs)
        return {
            "parse_dropped_invalid": self.parsed.dropped_invalid,
            # The strict parser never has two readings of one answer.
            "parse_dropped_ambiguous": 0,
            "parse_truncated": int(self.parsed.truncated),
            "parse_clean": int(self.parsed.clean),
            "parse_text_before_json": int("text_before_json" in self.parsed.notes),
            "parse_obj_total": len(self.parsed.objects),
            "valid_pred_objects": valid,
            "gt_objects": len(self.ground_truth.objects),
            "gt_dropped": len(self.ground_truth.dropped),
            "matched_pairs": matched,
            "matched_for_supervision": matched,
            # Transport in log space cannot fail, so every match is supervised.
            "excluded_from_supervision": 0,
            "matched_maskiou_sum": sum(pair.iou for pair in self.matching.pairs),
            "matched_maskiou_count": matched,
            "fp_count": valid - matched,
            "fn_count": len(self.matching.false_negatives),
            "gating_rejections": self.matching.gating_rejections,
            "candidates": self.matching.candidates,
            "prefix_coord_targets": len(self.prefix_coord_pos),
            "prefix_len": self.prefix_len,
            "append_len": self.train_len - self.prefix_len,
            "train_len": self.train_len,
            "tail_ignored": len(self.tail_ignore_pos),
        }


def build_target(
    response_ids: Sequence[int],
    gt: GroundTruth,
    vocab: CoordVocab,
    options: MatchOptions = DEFAULTS,
) -> MatchedTarget:
    """Turn an answer's ids and its record's ground truth into a supervised target. No ids make it raise."""
    parsed = parse_rollout(response_ids, vocab)
    pred = parsed.valid_objects
    matching = match(pred, gt.objects, options)
    taught = target_bins([(pred[pair.pred], gt.objects[pair.gt]) for pair in matching.pairs], options)
    positions = [position for pair in matching.pairs for position in pred[pair.pred].token_positions]
    missed = [gt.objects[i] for i in matching.false_negatives]
    tail_text = append_text(parsed.prefix_text, missed, (parsed.max_object_index or 0) + 1)
    tail = vocab.encode(tail_text)
    ignored, coord_pos, coord_bins = read_tail(tail, vocab)
    return MatchedTarget(
        parsed=parsed,
        ground_truth=gt,
        matching=matching,
        y_train_ids=(*parsed.prefix_ids, *tail),
        prefix_len=len(parsed.prefix_ids),
        append_text=tail_text,
        prefix_coord_pos=tuple(positions),
        prefix_coord_target_bins=tuple(one for bins in taught for one in bins),
        tail_ignore_pos=ignored,
        tail_coord_pos=coord_pos,
        tail_coord_bins=coord_bins,
    )


def read_tail(tail: list[int], vocab: CoordVocab) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the positions inside descriptions, the positions of coordinates, and their bins.

    Descriptions are looked up in the text that the tail's own ids spell, so a tokenizer that normalises text cannot
    shift them.
    """
    aligned = vocab.align(tail)
    starts, ends = aligned.starts[:-1], aligned.starts[1:].copy()
    # A token that ends inside a character reaches into the next one.
    ends[list(aligned.split)] += 1
    inside = np.zeros(len(tail), dtype=np.bool_)
    for first, last in desc_value_spans(aligned.text):
        low, high = np.searchsorted(ends, first, side="right"), np.searchsorted(starts, last, side="left")
        inside[low:high] = True
    bins: IntArray = vocab.bins_of(np.asarray(tail, dtype=np.int64))
    coords = np.flatnonzero((bins >= 0) & ~inside)
    return tuple(np.flatnonzero(inside).tolist()), tuple(coords.tolist()), tuple(bins[coords].tolist())
