"""One line for each figure: what it must be, from what a person has counted in a hand-made step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tests.unit.trainer.figures.hand_made import END_OF_TURN, TOP_K, Step, tokens

Oracle = Callable[[Step], float | None]


def over(part: float, whole: float) -> float | None:
    """Return a share; None where it is a share of nothing."""
    return part / whole if whole else None


def mean(values: Sequence[float]) -> float | None:
    return over(sum(values), len(values))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the value that `percent` of the sorted values are below, between neighbours by a straight line."""
    if not values:
        return None
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def generated(step: Step) -> list[int]:
    return [tokens(one.answer) for one in step.samples]


LENGTHS: Mapping[str, Callable[[Step], list[int]]] = {
    "prompt": lambda s: [one.prompt for one in s.samples],
    "rollout": generated,
    "train": lambda s: [tokens(one.prefix + one.tail) for one in s.trained],
    "append": lambda s: [tokens(one.tail) for one in s.trained],
    "encoded": lambda s: [one.prompt + tokens(one.prefix + one.tail) + END_OF_TURN for one in s.trained],
}

PARSING: Mapping[str, Oracle] = {
    "rollout/parse_dropped_invalid": lambda s: s.broken,
    "rollout/parse_truncated": lambda s: s.truncated,
    "rollout/parse_truncated_rate": lambda s: over(s.truncated, s.count),
    "rollout/parse_obj_total": lambda s: s.answered + s.broken,
    "rollout/objects_per_truth": lambda s: over(s.answered + s.broken, s.true),
    "rollout/parse_obj_valid_frac": lambda s: over(s.answered, s.answered + s.broken),
    "rollout/parse_obj_drop_frac": lambda s: over(s.broken, s.answered + s.broken),
    "rollout/sample_valid_pred_rate": lambda s: over(s.having(lambda one: one.answered > 0), s.count),
}

MATCHING: Mapping[str, Oracle] = {
    "rollout/valid_pred_objects": lambda s: s.answered,
    "rollout/gt_objects": lambda s: s.true,
    "rollout/fp": lambda s: s.answered - s.found,
    "rollout/fn": lambda s: s.true - s.found,
    "rollout/matched_for_supervision": lambda s: sum(one.found for one in s.trained),
    "rollout/valid_pred_objects_per_sample": lambda s: over(s.answered, s.count),
    "rollout/gt_objects_per_sample": lambda s: over(s.true, s.count),
    "rollout/fp_per_sample": lambda s: over(s.answered - s.found, s.count),
    "rollout/fn_per_sample": lambda s: over(s.true - s.found, s.count),
    "rollout/matched_for_supervision_per_sample": lambda s: over(sum(one.found for one in s.trained), s.count),
    "rollout/precision": lambda s: over(s.found, s.answered),
    "rollout/recall": lambda s: over(s.found, s.true),
    "rollout/f1": lambda s: over(2 * s.found, s.answered + s.true),
    "rollout/recall_iou50": lambda s: over(s.close, s.true),
    "rollout/f1_iou50": lambda s: over(2 * s.close, s.answered + s.true),
    "rollout/match_rate": lambda s: over(s.found, s.true),
    "rollout/sample_any_match_rate": lambda s: over(s.having(lambda one: one.found > 0), s.count),
    "rollout/gating_rejections": lambda s: s.below_gate,
    "rollout/gating_rejection_rate": lambda s: over(s.below_gate, TOP_K * s.answered),
    "rollout/matched_maskiou_mean": lambda s: over(s.overlap, s.found),
    "rollout/matched_maskiou_count": lambda s: s.found,
    "rollout/following": lambda s: s.following,
    "rollout/fn_appended": lambda s: s.appended,
    "rollout/excluded_from_supervision": lambda s: sum(one.found for one in s.samples if one.skipped),
    "rollout/excluded_rate": lambda s: over(sum(one.found for one in s.samples if one.skipped), s.found),
    "rollout/prefix_coord_targets_total": lambda s: s.targets,
    "rollout/prefix_coord_targets_per_matched": lambda s: over(
        s.targets, sum(one.found + one.following for one in s.trained)
    ),
    "rollout/tail_ignore_frac": lambda s: over(s.silent, sum(tokens(one.tail) for one in s.trained)),
    "rollout/duplicates_removed": lambda s: s.repeats,
    "rollout/unmatched_dropped": lambda s: s.removed,
    "rollout/unmatched_penalised": lambda s: s.penalised,
}

OF_LENGTHS: Mapping[str, Oracle] = {
    **{f"rollout/{name}_len_mean": lambda s, of=of: mean(of(s)) for name, of in LENGTHS.items()},
    **{f"rollout/{name}_len_p90": lambda s, of=of: percentile(of(s), 90) for name, of in LENGTHS.items()},
    "rollout/prefix_len_mean": lambda s: mean([tokens(one.prefix) for one in s.trained]),
    "rollout/overlong_cut": lambda s: s.cut,
    "rollout/overlong_skipped": lambda s: s.skipped,
}

GENERATION: Mapping[str, Oracle] = {
    "rollout/gen_new_tokens_total": lambda s: sum(generated(s)),
    "rollout/gen_new_tokens_mean": lambda s: mean(generated(s)),
    "rollout/gen_new_tokens_p90": lambda s: percentile(generated(s), 90),
    "rollout/gen_new_tokens_p99": lambda s: percentile(generated(s), 99),
    "rollout/gen_tokens_per_s": lambda s: over(sum(generated(s)), s.seconds),
    "rollout/decode_steps_per_token": lambda s: over(sum(generated(s)) - s.accepted, s.drafted and sum(generated(s))),
    "rollout/draft_acceptance_rate": lambda s: over(s.accepted, s.drafted),
    "rollout/staleness": lambda s: over(s.staleness, s.count),
    "rollout/decode_greedy": lambda s: s.count - s.beam,
    "rollout/decode_beam": lambda s: s.beam,
    "rollout/ended_by_repetition": lambda s: s.repeated,
    "rollout/ended_by_length": lambda s: s.at_limit,
}

OF_SAMPLES: Mapping[str, Oracle] = {
    **PARSING, **MATCHING, **OF_LENGTHS, **GENERATION, "bad_samples": lambda s: len(s.all) - s.count,
}  # fmt: skip
"""Figures of a step that follow from its samples."""

OF_AN_EVALUATION: Mapping[str, str] = {
    **{
        f"rollout_{name}": f"rollout/{name}"
        for name in (
            "precision", "recall", "f1", "recall_iou50", "f1_iou50", "fp", "fn", "gt_objects", "following",
            "gating_rejections", "sample_any_match_rate", "matched_maskiou_mean", "parse_dropped_invalid",
            "parse_truncated_rate", "sample_valid_pred_rate", "ended_by_repetition", "ended_by_length",
            "decode_steps_per_token", "draft_acceptance_rate",
        )
    },
    "rollout_matched": "rollout/matched_maskiou_count",
    "rollout_pred_objects": "rollout/valid_pred_objects",
}  # fmt: skip
"""Figures of an evaluation that are those of a step, by another name; nothing is skipped in an evaluation."""
