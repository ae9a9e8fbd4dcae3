"""Stage 2 with steps of stage 1 between: some optimizer steps train on the ground truth, and make no rollouts.

Which ones they are follows from the run's seed and the number of the step alone, so a run that goes on from a
checkpoint has the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.step_segments import StepSegments
from stage2_trainer.learner.supervised_step import SupervisedEStep
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch

_PHASES = 2**16


@dataclass(frozen=True)
class SupervisedSteps:
    """The optimizer steps of a run that train on the ground truth: a share of all, as even as can be.

    seed: of the run; it says how far into the first stretch without one they begin.
    """

    share: float
    seed: int

    def before(self, step: int) -> int:
        """Return how many of the steps before this one, counted from 0, train on the ground truth."""
        phase = Fraction(random.Random(f"supervised {self.seed}").randrange(_PHASES), _PHASES)
        return math.floor(step * Fraction(self.share) + phase)

    def __contains__(self, step: int) -> bool:
        return self.before(step + 1) > self.before(step)


class MixedEStep(EStep):
    """An E-step that leaves some optimizer steps to stage 1's. supervised: that one. steps: which."""

    def __init__(self, *, supervised: SupervisedEStep, steps: SupervisedSteps, **options: Any) -> None:
        super().__init__(**options)
        self._supervised = supervised
        self._steps = steps

    def begin(
        self,
        batches: Sequence[Sequence[Record]],
        model: nn.Module,
        *,
        global_step: int,
        stopwatch: Stopwatch,
        following: Sequence[Sequence[Record]] = (),
    ) -> StepSegments:
        """Begin the step on the ground truth, or ask for its rollouts. Raises as `EStep.begin`."""
        begin = self._supervised.begin if global_step in self._steps else super().begin
        return begin(batches, model, global_step=global_step, stopwatch=stopwatch, following=following)

    def finish(self, step: StepSegments) -> SyncReport | None:
        """Tell of a step that is all there. Raises as `EStep.finish`."""
        return self._supervised.finish(step) if step.global_step in self._steps else super().finish(step)
