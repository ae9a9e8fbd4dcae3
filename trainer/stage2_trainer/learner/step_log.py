"""What a run reports: a line for each step, and the mean loss of several steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState
from transformers.trainer_utils import speed_metrics

from stage2_trainer.learner.loss import LossFigures
from stage2_trainer.learner.rows import RowGroup
from stage2_trainer.learner.step import CurrentStep
from stage2_trainer.learner.step_record import Figures, SampleStats, StepRecord, server_drafts
from stage2_trainer.process.ranks import gathered, peak_bytes, world_size
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog
from stage2_trainer.telemetry.timeline import TIMELINE
from stage2_trainer.telemetry.trackers import Trackers


class StepLog:
    """The record of the step under way, and the line that it becomes.

    reuses: whether steps reuse rollouts. further: further figures of a step; all processes call it.
    """

    def __init__(
        self,
        log: EventLog,
        reporter: Reporter,
        bad: BadSamples,
        device: torch.device,
        *,
        top_k: int,
        reuses: bool,
        further: Callable[[int], Mapping[str, float | None]],
    ) -> None:
        self._log, self._reporter, self._bad, self._device = log, reporter, bad, device
        self._top_k, self._reuses, self._further = top_k, reuses, further
        self._trained = perf_counter()
        self.record = StepRecord()
        """The step that is under way."""
        self.figures: Figures = {}
        """The figures of the last step."""

    def note_rows(
        self, step: CurrentStep, groups: Sequence[RowGroup], losses: Sequence[LossFigures], *, divisor: float
    ) -> Tensor:
        """Note what a step has trained on; return its loss in this process."""
        record = self.record
        record.sync, record.version = step.report, step.step0
        record.samples += [sample for group in groups for sample in group.samples]
        record.rows += [group.figures for group in groups]
        record.losses += losses
        if self._reuses:
            record.reuse = step.reuse_figures()
        self._trained = perf_counter()
        return sum((one.values[0] / divisor for one in losses), start=torch.zeros((), device=self._device))

    def finish(self, step: int, *, norm: float | None, rate: float) -> Sequence[SampleStats]:
        """Write the line of a step; return the samples of all processes. All processes call it.

        Raises:
            TooManyBadSamples, BadStepError: as `BadSamples.note_lost`.
        """
        TIMELINE.note("optimizer", self._trained)
        with TIMELINE.measure("log"):
            self.record.settle()
        self.record.time = TIMELINE.end(step)
        record, self.record = StepRecord.joined(gathered(self.record)), StepRecord()
        try:
            bad = sum(sample.bad for sample in record.samples)
            self._bad.note_lost(step=step - 1, of=len(record.samples), bad=bad)
        finally:  # the step is complete, so its line is written whatever ends the run
            self._write(record, step, norm, rate)
        return record.samples

    def _write(self, record: StepRecord, step: int, norm: float | None, rate: float) -> None:
        figures = record.figures(top_k=self._top_k)
        if norm is not None:
            figures["grad_norm"] = norm
        figures["learning_rate"] = rate
        figures |= self._further(step)
        figures["bad_samples_total"] = float(self._bad.total)
        figures["memory/peak_bytes"] = float(max(gathered(peak_bytes(self._device))))
        servers = [asdict(server) for server in record.time.servers]
        answers = {"servers": servers, "drafts": server_drafts(record.samples)}
        self._log.write("step", {"step": step, **figures, **record.words(), **answers})
        tokens_per_second = figures.get("rollout/gen_tokens_per_s")
        self._reporter.update(step=step, loss=figures["loss"], tokens_per_second=tokens_per_second)
        self.figures = figures


class History:
    """The figures that a run reports every few steps, to the history in its state and to its trackers."""

    def __init__(self, log: EventLog, reporter: Reporter, trackers: Trackers, device: torch.device) -> None:
        self._log, self._reporter, self._trackers = log, reporter, trackers
        self._began, self._time = 0, 0.0  # this start's first step, and when it was
        self._reported = 0  # the step of the last report
        self._sum = torch.zeros((), device=device)  # of the losses since then
        self._total = 0.0  # of all losses reported by this start

    def begin(self, state: TrainerState) -> None:
        """Log the step at which training begins or resumes."""
        self._began = self._reported = state.global_step
        self._time = time.time()
        begun = {"step": state.global_step, "max_steps": state.max_steps, "processes": world_size()}
        self._log.write("start", begun)
        self._reporter.update(max_steps=state.max_steps)
        self._trackers.begin(state)

    def add(self, loss: Tensor) -> None:
        """Add the loss of a step."""
        self._sum = self._sum + loss

    def report(self, state: TrainerState, figures: Figures) -> None:
        """Report the mean loss since the last report, and the last step's figures. All processes call it."""
        losses = gathered(float(self._sum))
        total = sum(losses) / len(losses)
        self._sum = torch.zeros_like(self._sum)
        self._total += total
        steps, self._reported = state.global_step - self._reported, state.global_step
        self._keep(state, {**figures, "loss": total / steps})

    def evaluation(self, state: TrainerState, metrics: Mapping[str, Any]) -> None:
        """Report an evaluation."""
        self._log.write("evaluation", {"step": state.global_step, **metrics})
        self._keep(state, metrics)

    def end(self, state: TrainerState) -> None:
        """Report how fast the run was."""
        steps = state.global_step - self._began
        speeds = speed_metrics("train", self._time, num_steps=steps)
        self._keep(state, {**speeds, "train_loss": (self._total + float(self._sum)) / max(steps, 1)})
        self._trackers.end(state)

    def _keep(self, state: TrainerState, figures: Mapping[str, float | None]) -> None:
        """Add figures to the history, without nulls, which trackers do not take."""
        numbers = {name: value for name, value in figures.items() if value is not None}
        numbers["epoch"] = state.epoch or 0
        state.log_history.append({**numbers, "step": state.global_step})
        self._trackers.log(state, numbers)

    def saved(self, state: TrainerState) -> None:
        """Report that the last step has a checkpoint."""
        self._trackers.save(state)
