"""The forward and backward passes of an optimizer step's rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from stage2_trainer.data.encode import PromptCache
from stage2_trainer.data.images import ImageError
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.loss import LossParts
from stage2_trainer.learner.padding_free_batch import Segment, supervised_batch
from stage2_trainer.learner.rows import RowGroup, RowPlanner, SharedRowPlanner
from stage2_trainer.learner.step_record import StepRecord
from stage2_trainer.matching import CoordVocab
from stage2_trainer.model.finite import FiniteGuard
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import memory_bytes, rank, seeded_rng, world_size
from stage2_trainer.rollouts.bad_samples import BadSample, BadSamples
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import TIMELINE

logger = logging.getLogger(__name__)

RowTensors = Mapping[str, Any]  # of a row group, see `supervised_batch`


@dataclass
class RowPasses:
    """The passes of a run's rows; `begin` starts a step.

    placeholder: returns the segment that replaces a sample whose pixels are lost. seed: of the run.
    """

    engine: AccelerateEngine
    planner: RowPlanner
    cache: PromptCache
    bad: BadSamples
    vocab: CoordVocab
    pad_token_id: int
    placeholder: Callable[[str], Segment]
    finite: FiniteGuard
    interrupt: Interrupt
    reporter: Reporter
    seed: int
    step: int = 0
    divisor: float = 1.0
    record: StepRecord = field(default_factory=StepRecord)

    @property
    def shares_rows(self) -> bool:
        """Whether the processes share the rows of a step: its micro-steps are then those of all of them."""
        return isinstance(self.planner, SharedRowPlanner)

    def divisor_of(self, micro_steps: float) -> float:
        """Return what the loss of each micro-step is divided by: 1 where the mean is over the step already."""
        if self.planner.whole_step:
            return 1.0
        return micro_steps / world_size() if self.shares_rows else micro_steps

    def begin(self, step: int, record: StepRecord, *, divisor: float) -> None:
        """Begin an optimizer step. divisor: the loss of each micro-step is divided by it."""
        self.step, self.record, self.divisor = step, record, divisor

    def lay_out(self, group: RowGroup) -> dict[str, Any]:
        """Return the tensors of some rows."""
        with self.record.stopwatch.measure("mask_build"):
            batch = supervised_batch(
                group.rows,
                self.vocab,
                pad_token_id=self.pad_token_id,
                device=self.engine.device,
                pixels=self.cache.pixels,
                placeholder=partial(self._without_pixels, group),
            )
        return {**batch, "targets": batch["targets"].without_loss()} if group.repeated else batch

    def train_rows(self, group: RowGroup, batch: RowTensors, *, last: bool) -> LossParts:
        """Run a forward and a backward pass. last: gradients are reduced over processes. All processes call it."""
        self.interrupt.check()
        self.reporter.update(phase="training")
        stopwatch = self.record.stopwatch
        # The forward pass within counts for itself.
        with self._seeded(group), self.engine.run_pass(last=last), stopwatch.measure("backward"):
            with stopwatch.measure("forward"):
                parts: LossParts = self.engine.row(batch["model"], batch["targets"])
            loss = parts.total / self.divisor
            self.engine.backward(loss)
        self._note("row" if self.planner.whole_step else "micro-step", batch, loss)
        return parts

    def train_rows_early(self, group: RowGroup, batch: RowTensors) -> LossParts:
        """Run a forward pass, and a backward pass for either sum of the loss, into `early`."""
        assert self.early is not None, "rows train early"
        with self._seeded(group), self.engine.run_pass(last=True):
            with self.record.stopwatch.measure("forward"):
                ordinary, coords = self.engine.row(batch["model"], batch["targets"], apart=True)
            with TIMELINE.measure("backward"):
                self.early.add(ordinary.total, coords.total)
        parts: LossParts = ordinary.joined(coords)
        self._note("row", batch, parts.total)
        return parts

    @cached_property
    def early(self) -> EarlyGradients | None:
        """The gradients of rows that train while answers are awaited; None where no row can."""
        if not self.engine.keeps_gradients:
            return None
        return early_gradients(self.engine.trained, memory_bytes(self.engine.device))

    def _note(self, kind: str, batch: RowTensors, loss: torch.Tensor) -> None:
        apart = self.early.coords if self.planner.whole_step and self.early is not None else []
        self.finite.note(kind, batch["samples"], loss, apart)

    def _without_pixels(self, group: RowGroup, segment: Segment, error: ImageError) -> Segment:
        """Note a sample that is lost, unless its row only repeats another's; return its placeholder."""
        if not group.repeated:
            self.record.lost.append(segment.stats)
            self.bad.lose(BadSample.from_error(segment.sample_id, segment.images, error))
        return self.placeholder(segment.sample_id)

    def _seeded(self, group: RowGroup) -> AbstractContextManager[None]:
        """Seed the RNG of a pass, so that dropout does not depend on when, or in which process, its rows train.

        A run that resumes needs no state of the RNG: nothing else in a step draws from it.
        """
        process = 0 if self.shares_rows else rank()
        return seeded_rng((self.seed, self.step, process, group.place), self.engine.device)


EARLY_SHARE = 1 / 20  # of the device's memory, which gradients of coordinates may take at most
_MIB = 2**20


class EarlyGradients:
    """Gradients of rows that train before the step's counts are known: of each of the loss's two sums.

    Those of ordinary tokens are with the parameters; those of coordinates need as much memory once more, until `apply`
    divides and joins them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._coords: list[torch.Tensor | None] = [None] * len(parameters)

    @property
    def coords(self) -> list[torch.Tensor]:
        """The gradients of coordinates so far."""
        return [one for one in self._coords if one is not None]

    def add(self, ordinary: torch.Tensor, coords: torch.Tensor) -> None:
        """Run the backward passes of a row's two sums."""
        ordinary.backward(retain_graph=True)
        self._exchange()
        coords.backward()
        self._exchange()

    def apply(self, ce: float, coord: float) -> None:
        """Divide the gradients by the step's counts, and leave their sum with the parameters."""
        for i, parameter in enumerate(self._parameters):
            coords, self._coords[i] = self._coords[i], None
            if parameter.grad is not None:
                parameter.grad.div_(ce)
            if coords is not None:
                part = coords.div_(coord)
                parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

    def _exchange(self) -> None:
        for i, parameter in enumerate(self._parameters):
            parameter.grad, self._coords[i] = self._coords[i], parameter.grad


def early_gradients(parameters: Sequence[torch.nn.Parameter], memory_bytes: int) -> EarlyGradients | None:
    """Return early gradients on a device of so much memory; None where they would take too much of it."""
    needed, most = sum(one.nbytes for one in parameters), int(EARLY_SHARE * memory_bytes)
    sizes = needed / _MIB, most / _MIB
    if needed > most:
        logger.warning(
            "training starts only after a step's last answer: starting earlier needs %.0f MiB more for gradients, and "
            "the limit is %.0f MiB, a twentieth of the device's memory; LoRA (tuner.train_type: lora) needs less",
            *sizes,
        )
        return None
    logger.info(
        "training starts before all answers have arrived: %.0f MiB more for gradients, of at most %.0f MiB", *sizes
    )
    return EarlyGradients(parameters)
