"""The micro-steps of a run: on fresh rollouts, asked for a whole optimizer step at once, or on kept ones once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.rollout_buffer import ReuseBuffer
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.learner.row_planner import Row, RowPlanner, StepRowPlanner
from stage2_trainer.learner.step_segments import StepSegments
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch


@dataclass(frozen=True)
class MicroStep:
    """Rows to train on, their `packing/*` figures, and the figures of the samples that were made for them.

    place: of a row of a whole step among the others, by which they are told of and kept.
    """

    rows: Sequence[Row]
    figures: Mapping[str, float]
    samples: Sequence[SampleStats]
    place: int = 0


@dataclass
class Window:
    """One optimizer step under way: its raw batches, and how far it has come.

    following: the raw batches of the step after it, where its rollouts are asked for ahead. reused: optimizer steps
    that have trained on its rollouts before; None = fresh ones are made. planned: micro-steps that are ready
    beforehand. step0: the optimizer step that made the rollouts.
    """

    batches: Sequence[Sequence[Record]]
    following: Sequence[Sequence[Record]]
    global_step: int
    reused: int | None
    step0: int
    segments: StepSegments | None = None
    planned: list[MicroStep] = field(default_factory=list)
    taken: int = 0
    sync: SyncReport | None = None


class MicroSteps:
    """The micro-steps of a run, in order.

    ahead: whether all rollouts of a window are there before its first micro-step, so that its rows can be planned with
    sight of all of them; without it a micro-step begins when its own are. check: called while a micro-step waits; it
    may raise.
    """

    def __init__(
        self,
        estep: EStep,
        rows: RowPlanner | StepRowPlanner,
        *,
        ahead: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._estep = estep
        self._rows = rows
        self._ahead = ahead
        self._check = check
        self._rollout_buffer: ReuseBuffer[Sequence[MicroStep]] = ReuseBuffer()
        self._waited: Sequence[Segment] = ()
        self.window: Window | None = None

    def begin(
        self,
        batches: Sequence[Sequence[Record]],
        following: Sequence[Sequence[Record]] = (),
        *,
        global_step: int,
        uses: int,
    ) -> None:
        """Begin an optimizer step on these raw batches, whose rollouts `uses` steps train on, this one included.

        following: the raw batches of the next step, where rollouts are made one step ahead.
        """
        micro_steps = 1 if isinstance(self._rows, StepRowPlanner) else len(batches)
        reused = self._rollout_buffer.begin(global_step, uses=uses, micro_steps=micro_steps)
        self.window = Window(batches, following, global_step, reused, self._rollout_buffer.step0)
        if reused is None:
            self._waited = self._rows.waiting

    def waiting(self, global_step: int) -> Sequence[Segment]:
        """Return the segments that wait for a row in a run which goes on at `global_step`.

        Where that step is under way, or reuses rollouts, such a run makes them again: those wait that waited before.
        """
        under_way = self.window is not None and self.window.global_step == global_step
        return self._waited if under_way or self._rollout_buffer.reuses(global_step) else self._rows.waiting

    def take(self, model: nn.Module, stopwatch: Stopwatch) -> MicroStep:
        """Return the next micro-step."""
        window = self.window
        assert window is not None, "a window has begun"
        index = window.taken
        window.taken += 1
        if window.reused is not None:
            return self._rollout_buffer.again(index, window.batches[index])[0]
        if not window.planned:
            indices = range(index, len(window.batches) if self._ahead else index + 1)
            window.planned = self._generate(window, indices, model, stopwatch)
        made = window.planned.pop(0)
        self._rollout_buffer.keep(window.batches[index], [made])
        return made

    def rows(self, model: nn.Module, stopwatch: Stopwatch) -> Iterator[MicroStep]:
        """Yield the rows of a whole optimizer step (scope `step`), each as soon as it is known what it holds."""
        window = self.window
        assert window is not None, "a window has begun"
        records = [record for batch in window.batches for record in batch]
        if window.reused is not None:
            yield from self._rollout_buffer.again(0, records)
            return
        found = []
        for one in self._fresh_rows(window, model, stopwatch):
            found.append(one)
            yield one
        self._rollout_buffer.keep(records, sorted(found, key=lambda one: one.place))

    @property
    def all_in(self) -> bool:
        """Whether no rollout of the step under way is waited for any more."""
        segments = self.window.segments if self.window is not None else None
        return segments is None or segments.all_in

    def _fresh_rows(self, window: Window, model: nn.Module, stopwatch: Stopwatch) -> Iterator[MicroStep]:
        assert isinstance(self._rows, StepRowPlanner), "the rows of a whole step"
        step = self._begun(window, model, stopwatch)
        for row in self._rows.rows(len(step), self._segments(step, window, stopwatch)):
            yield MicroStep([row.segments], row.figures, [segment.stats for segment in row.segments], row.place)

    def _segments(self, step: StepSegments, window: Window, stopwatch: Stopwatch) -> Iterator[tuple[int, Segment]]:
        yield from step.as_they_come(stopwatch, self._check)
        window.sync = self._estep.finish(step)
        stopwatch.add(step.stopwatch)

    def _generate(self, window: Window, indices: range, model: nn.Module, stopwatch: Stopwatch) -> list[MicroStep]:
        step = window.segments or self._begun(window, model, stopwatch)
        segments = [[step.get(i, stopwatch, self._check) for i in step.indices(index)] for index in indices]
        if indices.stop == len(window.batches):
            window.sync = self._estep.finish(step)
            stopwatch.add(step.stopwatch)
        assert not isinstance(self._rows, StepRowPlanner), "rows of micro-steps"
        with stopwatch.measure("post_rollout_pack"):
            planned = self._rows.plan(segments)
        return [
            MicroStep(rows, figures, [segment.stats for segment in made])
            for (rows, figures), made in zip(planned, segments, strict=True)
        ]

    def _begun(self, window: Window, model: nn.Module, stopwatch: Stopwatch) -> StepSegments:
        window.segments = self._estep.begin(
            window.batches,
            model,
            global_step=window.global_step,
            stopwatch=stopwatch,
            following=window.following,
        )
        return window.segments
