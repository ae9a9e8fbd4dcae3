"""Rollout matching as a library: parse an answer, match it to ground truth, build what to train on.

Pure functions on token ids and numpy arrays; no model, no trainer, no network. Start with `build_target`.
"""

from stage2_trainer.matching.assign import Matching, MatchOptions, Pair, match
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject, ground_truth, serialize_objects
from stage2_trainer.matching.masks import (
    SegmentMeta,
    Supervision,
    packed_supervision,
    segment_meta,
    supervision,
    unsupervised_meta,
)
from stage2_trainer.matching.parse import ParsedObject, ParsedRollout, object_ends, parse_rollout
from stage2_trainer.matching.targets import MatchedTarget, build_target, ground_truth_target
from stage2_trainer.matching.tokens import CoordVocab, MatchingError, cut_before, vision_ids

__all__ = [
    "CoordVocab",
    "GTObject",
    "GroundTruth",
    "MatchOptions",
    "MatchedTarget",
    "Matching",
    "MatchingError",
    "Pair",
    "ParsedObject",
    "ParsedRollout",
    "SegmentMeta",
    "Supervision",
    "build_target",
    "cut_before",
    "ground_truth",
    "ground_truth_target",
    "match",
    "object_ends",
    "packed_supervision",
    "parse_rollout",
    "segment_meta",
    "serialize_objects",
    "supervision",
    "unsupervised_meta",
    "vision_ids",
]
