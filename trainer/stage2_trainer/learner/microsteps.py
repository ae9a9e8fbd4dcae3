"""The micro-steps of a run: on fresh rollouts, made one by one or a whole window ahead, or on kept ones once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.rollout_buffer import ReuseBuffer
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.learner.row_planner import Row, RowPlanner
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport


@dataclass(frozen=True)
class MicroStep:
    """RowPlanner to train on, their `packing/*` figures, and the figures of the samples that were made for them."""

    rows: Sequence[Row]
    figures: Mapping[str, float]
    samples: Sequence[SampleStats]


@dataclass
class Window:
    """One optimizer step under way: its raw batches, and how far it has come.

    reused: optimizer steps that have trained on its rollouts before; None = fresh ones are made. planned: micro-steps
    that are ready beforehand. step0: the optimizer step that made the rollouts.
    """

    batches: Sequence[Sequence[Record]]
    global_step: int
    reused: int | None
    step0: int
    planned: list[MicroStep] = field(default_factory=list)
    taken: int = 0
    sync: SyncReport | None = None


class MicroSteps:
    """The micro-steps of a run, in order.

    ahead: whether all rollouts of a window are made before its first micro-step, so that its rows can be planned with
    sight of all of them. The weights are the same for all of a window's micro-steps, and so are the rollouts.
    """

    def __init__(self, estep: EStep, rows: RowPlanner, *, ahead: bool = False) -> None:
        self._estep = estep
        self._rows = rows
        self._ahead = ahead
        self._rollout_buffer: ReuseBuffer[MicroStep] = ReuseBuffer()
        self._waited: Sequence[Segment] = ()
        self.window: Window | None = None

    def begin(self, batches: Sequence[Sequence[Record]], *, global_step: int, uses: int) -> None:
        """Begin an optimizer step on these raw batches, whose rollouts `uses` steps train on, this one included."""
        reused = self._rollout_buffer.begin(global_step, uses=uses, micro_steps=len(batches))
        self.window = Window(batches, global_step, reused, self._rollout_buffer.step0)
        if reused is None:
            self._waited = self._rows.waiting

    def waiting(self, global_step: int) -> Sequence[Segment]:
        """Return the segments that wait for a row in a run which goes on at `global_step`.

        Where that step reuses rollouts such a run makes them again, so they are those that waited before.
        """
        return self._waited if self._rollout_buffer.reuses(global_step) else self._rows.waiting

    def take(self, model: nn.Module, stopwatch: Stopwatch) -> MicroStep:
        """Return the next micro-step."""
        window = self.window
        assert window is not None, "a window has begun"
        index = window.taken
        window.taken += 1
        if window.reused is not None:
            return self._rollout_buffer.again(index, window.batches[index])
        if not window.planned:
            indices = range(index, len(window.batches) if self._ahead else index + 1)
            window.planned = self._generate(window, indices, model, stopwatch)
        made = window.planned.pop(0)
        self._rollout_buffer.keep(window.batches[index], made)
        return made

    def _generate(self, window: Window, indices: range, model: nn.Module, stopwatch: Stopwatch) -> list[MicroStep]:
        segments = []
        for index in indices:
            made, sync = self._estep(
                window.batches[index], model, global_step=window.global_step, micro_step=index, stopwatch=stopwatch
            )
            window.sync = sync or window.sync
            segments.append(made)
        with stopwatch.measure("post_rollout_pack"):
            planned = self._rows.plan(segments)
        return [
            MicroStep(rows, figures, [segment.stats for segment in made])
            for (rows, figures), made in zip(planned, segments, strict=True)
        ]
