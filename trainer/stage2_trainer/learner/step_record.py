"""Figures of samples, and the record of an optimizer step (semantics, sections 13 and 14).

A ratio of nothing is None, which the log writes as null: 0 would be a claim about objects that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stage2_trainer.learner.loss import LossFigures, step_losses
from stage2_trainer.sync.fleet.report import SyncReport, sync_figures, sync_words
from stage2_trainer.telemetry.timeline import StepTime, Stopwatch
from stage2_trainer.wire.requests import DraftCounts, draft_figures, share

Figures = dict[str, float | None]


@dataclass(frozen=True)
class SampleStats:
    """Counts of one rollout and of its training target; lengths are in tokens.

    `matched` pairs passed the gate; `matched_iou50` of them have a mask IoU of at least 0.5; `supervised` of them are
    trained on. `following`: boxes that match nothing, and are trained towards a true box.
    `staleness`: optimizer steps between the weights that generated it and those that train on it.
    `beam`: it is the best of several beams. `cut`, `skipped`: its answer was too long for a packed row.
    `bad`: it was set aside, and all else is 0. `from_truth`: nothing was generated for it.
    `drafted`, `accepted`, `verified`: as those of its `Rollout`. `server`: which generated it.
    `repeated`, `at_limit`: it was ended because it repeated itself, or at the token limit.
    `duplicates_removed`, `unmatched_dropped`, `unmatched_penalised`: objects that a variant of the targets removed from
    the answer, or trained against. What training makes of an answer is 0 in a skipped sample, and its lengths are in an
    evaluation, which encodes nothing. `sample_id`: of its record.
    """

    prompt_len: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    verified: tuple[int, ...] = ()
    server: str = ""
    truncated: bool = False
    valid_objects: int = 0
    dropped_invalid: int = 0
    gt_objects: int = 0
    matched: int = 0
    supervised: int = 0
    following: int = 0
    gating_rejections: int = 0
    maskiou_sum: float = 0.0
    matched_iou50: int = 0
    fn_appended: int = 0
    prefix_coord_targets: int = 0
    tail_ignored: int = 0
    prefix_len: int = 0
    append_len: int = 0
    train_len: int = 0
    encoded_len: int = 0
    staleness: int = 0
    beam: bool = False
    cut: bool = False
    skipped: bool = False
    repeated: bool = False
    at_limit: bool = False
    bad: bool = False
    from_truth: bool = False
    duplicates_removed: int = 0
    unmatched_dropped: int = 0
    unmatched_penalised: int = 0
    sample_id: str = ""


def supervised_metrics(stats: Sequence[SampleStats]) -> Figures:
    """Return the `supervised/*` figures of one optimizer step of stage 1, and `bad_samples`."""
    bad, stats = [s for s in stats if s.bad], [s for s in stats if not s.bad]
    trained = [s for s in stats if not s.skipped]
    objects = _sum(trained, lambda s: s.gt_objects)
    lengths = {
        "prompt": [s.prompt_len for s in stats],
        "train": [s.train_len for s in trained],
        "encoded": [s.encoded_len for s in trained],
    }
    return {
        "supervised/objects": objects,
        "supervised/objects_per_sample": share(objects, len(trained)),
        **{f"supervised/{name}_len_mean": _mean(values) for name, values in lengths.items()},
        **{f"supervised/{name}_len_p90": _percentile(values, 90) for name, values in lengths.items()},
        "supervised/overlong_skipped": _sum(stats, lambda s: s.skipped),
        "bad_samples": float(len(bad)),
    }


def rollout_metrics(stats: Sequence[SampleStats], *, top_k: int, generate_s: float) -> Figures:
    """Return the `rollout/*` figures of the samples of one optimizer step, and `bad_samples`.

    `top_k` is how many candidates a prediction has at most, `generate_s` the seconds that generation took. Samples that
    were set aside count as such and in nothing else.
    """
    bad, stats = [s for s in stats if s.bad], [s for s in stats if not s.bad]
    figures: Figures = {
        f"rollout/{name}": value
        for group in (
            _parse_metrics(stats),
            _match_metrics(stats, top_k),
            _supervision_metrics(stats),
            _length_metrics(stats),
            _generation_metrics(stats, generate_s),
        )
        for name, value in group.items()
    }
    return {**figures, "bad_samples": float(len(bad))}


def evaluation_metrics(stats: Sequence[SampleStats], *, top_k: int) -> Figures:
    """Return the `rollout_*` figures of held-out samples, without the evaluation's prefix."""
    quality = _match_metrics(stats, top_k)
    parse = _parse_metrics(stats)
    taken = ("precision", "recall", "f1", "gt_objects", "fp", "fn", "gating_rejections", "sample_any_match_rate")
    parsed = ("parse_dropped_invalid", "parse_truncated_rate", "sample_valid_pred_rate")
    return {
        **{f"rollout_{name}": quality[name] for name in taken},
        **{f"rollout_{name}": parse[name] for name in parsed},
        "rollout_pred_objects": quality["valid_pred_objects"],
        "rollout_matched": quality["matched_maskiou_count"],
        "rollout_following": _sum(stats, lambda s: s.following),
        "rollout_matched_maskiou_mean": quality["matched_maskiou_mean"],
        "rollout_recall_iou50": quality["recall_iou50"],
        "rollout_f1_iou50": quality["f1_iou50"],
        "rollout_ended_by_repetition": _sum(stats, lambda s: s.repeated),
        "rollout_ended_by_length": _sum(stats, lambda s: s.at_limit),
        **{f"rollout_{name}": value for name, value in _draft_figures(stats).items()},
    }


def _parse_metrics(stats: Sequence[SampleStats]) -> Figures:
    valid = _sum(stats, lambda s: s.valid_objects)
    invalid = _sum(stats, lambda s: s.dropped_invalid)
    truncated = _sum(stats, lambda s: s.truncated)
    total = valid + invalid
    return {
        "parse_dropped_invalid": invalid,
        "parse_truncated": truncated,
        "parse_truncated_rate": share(truncated, len(stats)),
        "parse_obj_total": total,
        "objects_per_truth": share(total, _sum(stats, lambda s: s.gt_objects)),
        "parse_obj_valid_frac": share(valid, total),
        "parse_obj_drop_frac": share(invalid, total),
        "sample_valid_pred_rate": share(_sum(stats, lambda s: s.valid_objects > 0), len(stats)),
    }


def _match_metrics(stats: Sequence[SampleStats], top_k: int) -> Figures:
    predicted = _sum(stats, lambda s: s.valid_objects)
    truth = _sum(stats, lambda s: s.gt_objects)
    matched = _sum(stats, lambda s: s.matched)
    close = _sum(stats, lambda s: s.matched_iou50)
    rejections = _sum(stats, lambda s: s.gating_rejections)
    counts = {
        "valid_pred_objects": predicted,
        "gt_objects": truth,
        "fp": predicted - matched,
        "fn": truth - matched,
        "matched_for_supervision": _sum(stats, lambda s: s.supervised),
    }
    return {
        **counts,
        **{f"{name}_per_sample": share(count, len(stats)) for name, count in counts.items()},
        "precision": share(matched, predicted),
        "recall": share(matched, truth),
        "f1": share(2 * matched, predicted + truth),
        "recall_iou50": share(close, truth),
        "f1_iou50": share(2 * close, predicted + truth),
        "match_rate": share(matched, truth),
        "sample_any_match_rate": share(_sum(stats, lambda s: s.matched > 0), len(stats)),
        "gating_rejections": rejections,
        "gating_rejection_rate": share(rejections, predicted * top_k),
        "matched_maskiou_mean": share(_sum(stats, lambda s: s.maskiou_sum), matched),
        "matched_maskiou_count": matched,
    }


def _supervision_metrics(stats: Sequence[SampleStats]) -> Figures:
    matched, supervised = _sum(stats, lambda s: s.matched), _sum(stats, lambda s: s.supervised)
    following = _sum(stats, lambda s: s.following)
    targets = _sum(stats, lambda s: s.prefix_coord_targets)
    return {
        "following": following,
        "fn_appended": _sum(stats, lambda s: s.fn_appended),
        "excluded_from_supervision": matched - supervised,
        "excluded_rate": share(matched - supervised, matched),
        "prefix_coord_targets_total": targets,
        "prefix_coord_targets_per_matched": share(targets, supervised + following),
        "tail_ignore_frac": share(_sum(stats, lambda s: s.tail_ignored), _sum(stats, lambda s: s.append_len)),
        "duplicates_removed": _sum(stats, lambda s: s.duplicates_removed),
        "unmatched_dropped": _sum(stats, lambda s: s.unmatched_dropped),
        "unmatched_penalised": _sum(stats, lambda s: s.unmatched_penalised),
    }


def _length_metrics(stats: Sequence[SampleStats]) -> Figures:
    trained = [s for s in stats if not s.skipped]
    lengths = {
        "prompt": [s.prompt_len for s in stats],
        "rollout": [s.generated for s in stats],
        "train": [s.train_len for s in trained],
        "append": [s.append_len for s in trained],
        "encoded": [s.encoded_len for s in trained],
    }
    return {
        **{f"{name}_len_mean": _mean(values) for name, values in lengths.items()},
        **{f"{name}_len_p90": _percentile(values, 90) for name, values in lengths.items()},
        "prefix_len_mean": _mean([s.prefix_len for s in trained]),
        "overlong_cut": _sum(stats, lambda s: s.cut),
        "overlong_skipped": _sum(stats, lambda s: s.skipped),
    }


def _generation_metrics(stats: Sequence[SampleStats], generate_s: float) -> Figures:
    generated = [s.generated for s in stats]
    return {
        "gen_new_tokens_total": float(sum(generated)),
        "gen_new_tokens_mean": _mean(generated),
        "gen_new_tokens_p90": _percentile(generated, 90),
        "gen_new_tokens_p99": _percentile(generated, 99),
        "gen_tokens_per_s": share(sum(generated), generate_s),
        **_draft_figures(stats),
        "staleness": _mean([s.staleness for s in stats]),
        "decode_greedy": _sum(stats, lambda s: not s.beam),
        "decode_beam": _sum(stats, lambda s: s.beam),
        "ended_by_repetition": _sum(stats, lambda s: s.repeated),
        "ended_by_length": _sum(stats, lambda s: s.at_limit),
    }


def _draft_figures(stats: Sequence[SampleStats]) -> Figures:
    return draft_figures(
        generated=sum(s.generated for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
    )


def server_drafts(stats: Sequence[SampleStats]) -> list[dict[str, Any]]:
    """Return what drafts did at each server that generated one of these samples, by the server's name."""
    counts = [
        DraftCounts(s.server, s.generated, s.drafted, s.accepted, s.verified)
        for s in stats
        if not s.bad and not s.from_truth
    ]
    return [one.figures() for one in DraftCounts.joined(counts)]


def _sum(stats: Sequence[SampleStats], of: Callable[[SampleStats], float]) -> float:
    return float(sum(map(of, stats)))


def _mean(values: Sequence[int]) -> float | None:
    return share(sum(values), len(values))


def _percentile(values: Sequence[int], percent: int) -> float | None:
    return float(np.percentile(values, percent)) if values else None


_TIMED = (
    "rollout_generate", "rollout_parse_match", "rollout_teacher_encode", "post_rollout_pack", "forward", "mask_build",
)  # fmt: skip


@dataclass
class StepRecord:
    """Figures of one optimizer step; losses and row figures have one entry for each micro-step or row.

    version: of the weights that were pushed for the step's rollouts. sync: that push; None: an earlier step or an
    evaluation had pushed them. reuse: the `rollout/buffer_*` figures of a run that reuses rollouts. time: where
    the step's wall time went. lost: the samples whose pixels were lost when their rows were laid out. losses: their
    numbers are on the device until `settle` reads them, once a step, because reading waits for it.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    samples: list[SampleStats] = field(default_factory=list)
    losses: list[LossFigures] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    sync: SyncReport | None = None
    version: int = -1
    reuse: Mapping[str, float] = field(default_factory=dict)
    time: StepTime = field(default_factory=StepTime)
    lost: list[SampleStats] = field(default_factory=list)

    def figures(self, *, top_k: int) -> Figures:
        """Return the record: `loss` and `loss/*`, means of `packing/*` over micro-steps, sums of times and counts."""
        seconds = self.stopwatch.seconds
        return {
            **step_losses(self.losses),
            **_means(self.rows),
            **{f"time/{name}_s": seconds.get(name, 0.0) for name in _TIMED},
            **(supervised_metrics(self.samples) if self._is_supervised else self._rollout_figures(top_k)),
            **self.time.figures(),
        }

    @property
    def _is_supervised(self) -> bool:
        return any(sample.from_truth for sample in self.samples)

    def words(self) -> dict[str, str]:
        """Return the words of the step's sync; none for a step without rollouts."""
        return {} if self._is_supervised else sync_words(self.sync)

    def _rollout_figures(self, top_k: int) -> Figures:
        generate_s = self.stopwatch.seconds.get("rollout_generate", 0.0)
        figures = rollout_metrics(self.samples, top_k=top_k, generate_s=generate_s)
        return {**figures, **self.reuse, "sync/version": self.version, **sync_figures(self.sync)}

    def settle(self) -> None:
        """Read the numbers of all losses from the device, at once."""
        self.losses = LossFigures.read(self.losses)

    @classmethod
    def joined(cls, records: Sequence[StepRecord]) -> StepRecord:
        """Return the record of all learner processes: all their samples and rows, and the longest time of each kind.

        Samples that any of them has lost are bad there.
        """
        first = records[0]
        watch = Stopwatch()
        for name in {name for record in records for name in record.stopwatch.seconds}:
            watch.seconds[name] = max(record.stopwatch.seconds.get(name, 0.0) for record in records)
        return replace(
            first,
            stopwatch=watch,
            samples=_set_aside(
                [sample for record in records for sample in record.samples],
                {sample for record in records for sample in record.lost},
            ),
            losses=[loss for record in records for loss in record.losses],
            rows=[row for record in records for row in record.rows],
            time=StepTime.joined([record.time for record in records]),
        )


def _set_aside(samples: Sequence[SampleStats], lost: Set[SampleStats]) -> list[SampleStats]:
    """Return the samples of a step, with the lost ones as bad ones. One that waited for its row so far is added.

    Several records may have one id, so samples are compared as a whole.
    """
    waited = lost - set(samples)
    return [
        *(_bad(sample) if sample in lost else sample for sample in samples),
        *sorted(map(_bad, waited), key=lambda sample: sample.sample_id),
    ]


def _bad(sample: SampleStats) -> SampleStats:
    return SampleStats(bad=True, from_truth=sample.from_truth, sample_id=sample.sample_id)


def _means(entries: Sequence[Mapping[str, float]]) -> Figures:
    """Return the mean of each figure over the entries that have it."""
    names = dict.fromkeys(name for entry in entries for name in entry)
    values = {name: [entry[name] for entry in entries if name in entry] for name in names}
    return {name: share(sum(known), len(known)) for name, known in values.items()}
