"""A run from its first optimizer step to its last. One step:

    sync, ask      weights to the servers; all rollouts of the step are requested   estep.EStep
    rows           each as soon as its answers are parsed, matched and packed       rows.RowPlanner
    backward       a row's forward pass is its loss; gradients add up               passes.RowPasses
    clip, check    a loss or gradient that is not finite ends the run               model.finite.FiniteGuard
    step           optimizer and schedule                                           engine.AccelerateEngine
    log            the step's line; now and then a report                           step_log.StepLog, History
    evaluate       rollouts of held-out records; the best checkpoint                evaluate.Evaluation, best.Best
    save           staged, checked, renamed                                         model.run_checkpoints.Checkpoints

With DeepSpeed the last backward pass clips and steps too, so the check comes after: what it finds is never saved.
Stage 1 is the same page: its EStep requests no rollouts and teaches the ground truth. GRPO trains with TRL's trainer
(docs/decisions/0020).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerState, set_seed

from stage2_trainer.data.records import Record
from stage2_trainer.learner.best import Best
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.evaluate import Evaluation
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.rows import load_waiting, save_waiting
from stage2_trainer.learner.run_state import read_run, write_run
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.schedule import Schedule, Window
from stage2_trainer.learner.step import CurrentStep, Mean, train_step
from stage2_trainer.learner.step_log import History, StepLog
from stage2_trainer.model.best_checkpoint import EVALUATION
from stage2_trainer.model.finite import FiniteGuard
from stage2_trainer.model.run_checkpoints import Checkpoints
from stage2_trainer.process.activity import ACTIVITY, evaluation_name
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import gathered
from stage2_trainer.telemetry.timeline import TIMELINE

logger = logging.getLogger(__name__)


@dataclass
class Learner:
    """A run: its parts, and where it stands.

    mean: over what the loss is a mean (`step`). runaway: ends a run whose answers run away. processor: saved beside
    the weights.
    """

    engine: AccelerateEngine
    schedule: Schedule
    step: CurrentStep
    passes: RowPasses
    mean: Mean
    log: StepLog
    history: History
    finite: FiniteGuard
    runaway: RunawayWatch
    evaluation: Evaluation
    held_out: Sequence[Record]
    best: Best
    checkpoints: Checkpoints
    interrupt: Interrupt
    processor: Any = None
    state: TrainerState = field(default_factory=TrainerState)
    _began: int = field(default=0, init=False)

    def train(self, checkpoint: Path | None = None) -> None:
        """Train to the last step, from the beginning or from a checkpoint.

        Raises:
            NonFiniteError, CheckpointError, ServerError, PackingError, BadStepError, RunawayError, Interrupted.
        """
        with ACTIVITY.doing(f"resuming from {checkpoint}" if checkpoint else "starting to train") as under_way:
            self._begin(checkpoint)
            windows = self.schedule.windows(self.state.global_step)
            while (window := self._read(windows)) is not None:
                under_way.restart(f"step {window.step + 1} of {self.schedule.max_steps}")
                self._train_rows(window)  # syncs, asks, and leaves the step's gradients with the parameters
                norm, rate = self._change_weights(window)
                samples = self.log.finish(self.state.global_step, norm=norm, rate=rate)
                if self.step.reused is None:  # rollouts that serve several steps are judged once
                    self.runaway.note(samples, step=self.state.global_step)
                if self.schedule.reports(window):
                    self.history.report(self.state, self.log.figures)
                better = False
                if self.schedule.evaluates(window):
                    better = self.best.is_new(self.evaluate(), self.state)
                if better or self.schedule.saves(window):
                    self._save()
            self._end()

    def save_progress(self) -> None:
        """Save the last step of this start, unless it is on disk: the run ends early.

        Nothing is saved in the middle of a step.
        """
        step = self.state.global_step
        if self.engine.stepping:
            logger.warning("stopped in the middle of an optimizer step: its changes are not saved")
        elif step > self._began and self.checkpoints.is_missing(step):  # one process alone may have got no further
            self._save()

    def set_unproved_aside(self) -> None:
        """Rename what was saved since the last proof: a server that is known to be wrong now may have been so then."""
        self.checkpoints.set_unproved_aside(self._began)

    def _begin(self, checkpoint: Path | None) -> None:
        set_seed(self.engine.args.seed)
        if checkpoint is not None:
            self._restore(checkpoint)
        args, state = self.engine.args, self.state
        state.max_steps, state.num_train_epochs = self.schedule.max_steps, self.schedule.num_epochs
        state.compute_steps(args, self.schedule.max_steps)
        state.train_batch_size = args.per_device_train_batch_size
        state.is_world_process_zero = args.process_index == 0
        state.is_local_process_zero = args.local_process_index == 0
        self.finite.check_start(step=state.global_step)
        self.best.begin(state)
        self.history.begin(state)
        if checkpoint is None and self.schedule.evaluates_first:
            self.evaluate()

    def _restore(self, checkpoint: Path) -> None:
        self.state = read_run(checkpoint, self.engine)
        self._began = self.state.global_step
        self.passes.bad.load(checkpoint)
        if waiting := load_waiting(checkpoint, all_in_first=self.passes.shares_rows):
            self.passes.planner.wait(waiting)

    def _read(self, windows: Iterator[Window]) -> Window | None:
        """Read the records of the next step: its time begins, and SIGTERM ends the wait for a slow disk."""
        with self.interrupt.stoppable():
            TIMELINE.begin()
            return next(windows, None)

    def _train_rows(self, window: Window) -> None:
        """Sync, ask, and leave the step's gradients with the parameters.

        `train_step` pulls rows one by one: the first syncs the weights and requests all rollouts.
        """
        self.interrupt.check()
        with self.interrupt.stoppable():
            self.step.set_batches(window.batches, window.following, global_step=window.step, uses=window.uses)
            self.passes.begin(window.step, self.log.record, divisor=self.passes.divisor_of(len(window.batches)))
            stopwatch, divisor = self.log.record.stopwatch, self.passes.divisor
            groups, losses = train_step(self.step, self.passes, stopwatch, mean=self.mean, divisor=divisor)
        self.history.add(self.log.note_rows(self.step, groups, losses, divisor=divisor))

    def _change_weights(self, window: Window) -> tuple[float | None, float]:
        """Clip, check and step; return the norm of the gradients and the learning rate of the step."""
        self.engine.stepping = True
        norm, rate = self.engine.step(partial(self.finite.check, step=window.step + 1))
        self.state.global_step, self.state.epoch = window.step + 1, window.epoch_after
        self.engine.stepping = False
        return norm, rate

    def evaluate(self) -> Mapping[str, float | None]:
        """Answer the held-out records with the weights as they are, and report how good the answers are."""
        step = self.state.global_step
        evaluating = ACTIVITY.doing(evaluation_name(step))
        with evaluating, TIMELINE.measure("evaluate"), self.interrupt.stoppable():
            figures = self.evaluation(self.held_out, self.engine.policy, global_step=step)
        metrics = {f"{EVALUATION}{name}": value for name, value in figures.items()}
        self.history.evaluation(self.state, metrics)
        return metrics

    def _save(self) -> None:
        """Write a checkpoint of the last step. Raises NonFiniteError, CheckpointError."""
        self.finite.check_weights(step=self.state.global_step)
        with TIMELINE.measure("save"):
            self.checkpoints.save(self.state, self._write)
        self.history.saved(self.state)

    def _write(self, folder: Path) -> None:
        write_run(folder, self.engine, self.processor)
        save_waiting(folder, self.step.waiting(self.state.global_step))
        self.passes.bad.save(folder, before=self.state.global_step)

    def _end(self) -> None:
        self.history.end(self.state)
        if left := sum(gathered(len(self.passes.planner.waiting))):
            logger.warning("%d samples still waited for a packed row when the run ended, and were not trained on", left)
