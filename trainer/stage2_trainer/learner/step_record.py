"""The record of one optimizer step, collected over its micro-steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stage2_api.errors import Problem
from stage2_api.rollout_matching import Runaway
from stage2_trainer.learner.loss import LOSS_FIGURES
from stage2_trainer.learner.rollout_metrics import SampleStats, rollout_metrics, supervised_metrics
from stage2_trainer.learner.rows import RowGroup
from stage2_trainer.learner.step import Steps
from stage2_trainer.rollouts.errors import RunawayError
from stage2_trainer.sync.fleet.report import SyncReport, sync_figures, sync_words
from stage2_trainer.telemetry.step_time import StepTime
from stage2_trainer.telemetry.timeline import Stopwatch

KEY = "custom.extra.rollout_matching.runaway"
_WAY_OUT = (
    "look at the last rollouts; go on with supervised_share above 0, unmatched_objects dropped or penalised, or a"
    " repetition_penalty of 1.05, in another training.output_dir or with training.resume: allow-changes; or raise it."
    " The checkpoint of this step is saved"
)
REUSED = "rollout/buffer_reuse"
# Record key for each stopwatch name.
_TIMES = {
    "rollout_generate": "time/rollout_generate_s",
    "rollout_parse_match": "time/rollout_parse_match_s",
    "rollout_teacher_encode": "time/rollout_teacher_encode_s",
    "post_rollout_pack": "time/post_rollout_pack_s",
    "forward": "time/forward_s",
    "mask_build": "time/mask_build_s",
}


@dataclass
class StepRecord:
    """Figures of one optimizer step; losses and row figures have one entry for each micro-step or row.

    version: of the weights that generated the step's rollouts. sync: the push of those weights; None: an earlier step
    or an evaluation had pushed them. reuse: the `rollout/buffer_*` figures of a run that reuses rollouts. time: where
    the step's wall time went. pending: figures of losses (5,), on the device: reading them waits for it, so `settle`
    does that once a step.
    """

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    samples: list[SampleStats] = field(default_factory=list)
    losses: list[Mapping[str, float]] = field(default_factory=list)
    pending: list[torch.Tensor] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    sync: SyncReport | None = None
    version: int = -1
    reuse: Mapping[str, float] = field(default_factory=dict)
    time: StepTime = field(default_factory=StepTime)

    def figures(self, *, top_k: int) -> dict[str, float]:
        """Return the record: `loss`, `loss/*`, `packing/*` as means over micro-steps, times and counts as sums."""
        seconds = self.stopwatch.seconds
        return {
            **_means(self.losses),
            **_means(self.rows),
            **{key: seconds.get(name, 0.0) for name, key in _TIMES.items()},
            **(supervised_metrics(self.samples) if self._is_supervised else self._rollout_figures(top_k)),
            **self.time.figures(),
        }

    @property
    def is_reused(self) -> bool:
        """Whether the step trained on rollouts of an earlier one."""
        return bool(self.reuse.get(REUSED))

    @property
    def _is_supervised(self) -> bool:
        return any(sample.from_truth for sample in self.samples)

    def words(self) -> dict[str, str]:
        """Return the words of the step's sync; none for a step without rollouts."""
        return {} if self._is_supervised else sync_words(self.sync)

    def _rollout_figures(self, top_k: int) -> dict[str, float]:
        generate_s = self.stopwatch.seconds.get("rollout_generate", 0.0)
        figures = rollout_metrics(self.samples, top_k=top_k, generate_s=generate_s)
        return {**figures, **self.reuse, "sync/version": self.version, **sync_figures(self.sync)}

    def note(self, groups: Sequence[RowGroup], steps: Steps, *, reuses: bool) -> None:
        """Add the row groups of the step that was trained. reuses: whether the run trains on rollouts repeatedly."""
        for one in groups:
            self.samples += one.samples
            self.rows.append(one.figures)
        self.sync, self.version = steps.report, steps.step0
        if reuses:
            self.reuse = {
                REUSED: float(steps.reused is not None),
                "rollout/buffer_window_step0": float(steps.step0),
                "rollout/buffer_completed_steps": float(steps.reused or 0),
            }

    def settle(self) -> None:
        """Read the figures of all losses from the device, at once."""
        if self.pending:
            self.losses += [dict(zip(LOSS_FIGURES, one, strict=True)) for one in torch.stack(self.pending).tolist()]
            self.pending.clear()

    @classmethod
    def joined(cls, records: Sequence[StepRecord]) -> StepRecord:
        """Return the record of all learner processes: all their samples and rows, and the longest time of each kind."""
        first = records[0]
        watch = Stopwatch()
        for name in {name for record in records for name in record.stopwatch.seconds}:
            watch.seconds[name] = max(record.stopwatch.seconds.get(name, 0.0) for record in records)
        return replace(
            first,
            stopwatch=watch,
            samples=[sample for record in records for sample in record.samples],
            losses=[loss for record in records for loss in record.losses],
            rows=[row for record in records for row in record.rows],
            time=StepTime.joined([record.time for record in records]),
        )


def _means(entries: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for entry in entries for name in entry)
    return {name: sum(entry.get(name, 0.0) for entry in entries) / len(entries) for name in names}


class RunawayWatch:
    """Ends a run whose answers run away: more and more objects that are not there, until the token limit cuts them.

    By default unmatched objects cost nothing while each may reduce the misses, so a share of runs grows so.
    """

    def __init__(self, rule: Runaway) -> None:
        self._rule = rule
        self._counts: deque[_Counts] = deque(maxlen=rule.steps)

    def note(self, samples: Sequence[SampleStats], *, step: int) -> None:
        """Count the samples of a step with fresh rollouts. All processes note the same.

        Raises:
            RunawayError: over as many steps as the rule says there are more objects, or more cut answers, than it
                allows.
        """
        rolled_out = [one for one in samples if not one.bad and not one.from_truth]
        if not self._rule.enabled or not rolled_out:
            return
        self._counts.append(
            _Counts(
                len(rolled_out),
                sum(one.truncated for one in rolled_out),
                sum(one.valid_objects + one.dropped_invalid + one.dropped_ambiguous for one in rolled_out),
                sum(one.gt_objects for one in rolled_out),
            )
        )
        if len(self._counts) == self._rule.steps and (problems := self._problems(step)):
            raise RunawayError(problems)

    def _problems(self, step: int) -> list[Problem]:
        answers, truncated, objects, truth = (
            sum(getattr(one, name) for one in self._counts) for name in ("answers", "truncated", "objects", "truth")
        )
        per_truth, share = objects / max(truth, 1), truncated / answers
        over = f"over the last {self._rule.steps} optimizer steps with rollouts, up to step {step}, {answers} answers"
        found = {
            "objects_per_truth": (
                per_truth,
                f"{over} have {objects} objects for {truth} true ones, {per_truth:.2f} each",
            ),
            "truncated_share": (share, f"of {over} {truncated} end within the JSON, a share of {share:.2f}"),
        }
        return [
            Problem(f"{KEY}.{name}", getattr(self._rule, name), f"answers run away: {text}; this is the most", _WAY_OUT)
            for name, (value, text) in found.items()
            if value > getattr(self._rule, name)
        ]


@dataclass(frozen=True)
class _Counts:
    """Counts of the fresh rollouts of one optimizer step, or of several."""

    answers: int
    truncated: int
    objects: int
    truth: int
