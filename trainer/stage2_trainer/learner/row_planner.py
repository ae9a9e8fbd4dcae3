"""The rows of a micro-step: its segments packed into one, or each in a row of its own.

Packing looks at one micro-step (scope `micro`, what does not fit waits for the next), at a whole accumulation window
(scope `window`, nothing waits), or at an optimizer step's segments without regard to micro-steps (scope `step`, nothing
waits). Source: semantics, sections 7 and 8.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.packing import HalvedRows, PackingBuffer, PackingError, pack_window

logger = logging.getLogger(__name__)

Row = Sequence[Segment]
_SCOPE = "packing/post_rollout_scope_window"
PlannedRows = tuple[list[Row], Mapping[str, float]]  # the rows of a micro-step, and its `packing/*` figures


class RowPlanner(Protocol):
    """A planner of micro-steps' rows."""

    @property
    def waiting(self) -> Sequence[Segment]:
        """The segments that have not been trained on yet, oldest first."""
        ...

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait behind those that do."""
        ...

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PlannedRows]:
        """Return what to train on in each of these micro-steps, now that their segments are new."""
        ...


class SingleRowPlanner:
    """Every segment in a row of its own (training.packing: false)."""

    waiting: Sequence[Segment] = ()

    def wait(self, segments: Sequence[Segment]) -> None:
        """Refuse: no segment waits.

        Raises:
            PackingError: always.
        """
        raise PackingError(
            f"{len(segments)} segments of the checkpoint wait for a packed row, and training.packing is false; "
            "go on with the configuration that the checkpoint was written with"
        )

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PlannedRows]:
        """Return a row for each segment."""
        return [([[segment] for segment in segments], {}) for segments in micro_steps]


class PackedRowPlanner:
    """One row for each micro-step; what does not fit waits for the next one.

    `length` in tokens; `min_fill` is the share of it below which a person is warned, once; `capacity` is how many
    segments may wait. Raises PackingError when a segment is longer than a row, or too many wait.
    """

    def __init__(self, length: int, *, capacity: int, min_fill: float) -> None:
        self._length = length
        self._min_fill = min_fill
        self._buffer: PackingBuffer[Segment] = PackingBuffer(packing_length=length, capacity=capacity)
        self._warned = False

    @property
    def waiting(self) -> Sequence[Segment]:
        """The segments that have not been trained on yet, oldest first."""
        return self._buffer.items

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait behind those that do. Raises PackingError as `plan`."""
        self._buffer.insert(segments, [len(segment) for segment in segments])

    def give_up(self) -> list[Segment]:
        """Return the segments that wait, oldest first; none waits any more."""
        return self._buffer.empty()

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PlannedRows]:
        """Return for each micro-step the one row that holds the oldest segment and is as full as can be."""
        return [self._next(segments) for segments in micro_steps]

    def _next(self, segments: Sequence[Segment]) -> PlannedRows:
        self.wait(segments)
        row = self._buffer.take()
        self._warn(row.total_len / self._length)
        return [row.items], _row_figures(row.total_len, self._length, len(row.items), waiting=len(self._buffer))

    def _warn(self, fill: float) -> None:
        if fill < self._min_fill and not self._warned:
            self._warned = True
            logger.warning(
                "a packed row is %.0f %% full, below training.packing_min_fill_ratio = %g: "
                "raise training.per_device_train_batch_size or lower global_max_length",
                100 * fill,
                self._min_fill,
            )


class WindowRowPlanner:
    """One row for each micro-step of a window of `window` micro-steps, all its segments spread over them; none waits.

    The last window of an epoch may be partial: its micro-steps are packed one by one by `partial`, and what that leaves
    waiting goes into the next window that has room for it. `length` in tokens. Raises PackingError when there is no way
    to spread a window's own segments, or a segment is longer than a row.
    """

    def __init__(self, length: int, *, window: int, partial: PackedRowPlanner) -> None:
        self._length = length
        self._window = window
        self._partial = partial

    @property
    def waiting(self) -> Sequence[Segment]:
        """The segments of a partial window that have not been trained on yet, oldest first."""
        return self._partial.waiting

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait for a window that has room for them."""
        self._partial.wait(segments)

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PlannedRows]:
        """Return exactly one row, never an empty one, for each micro-step."""
        if len(micro_steps) < self._window:
            return [(rows, {**figures, _SCOPE: 0.0}) for rows, figures in self._partial.plan(micro_steps)]
        segments = [segment for micro_step in micro_steps for segment in micro_step]
        carried = self._partial.give_up()
        try:
            return self._spread([*carried, *segments])
        except PackingError:
            if not carried:
                raise
        planned = self._spread(segments)
        self._partial.wait(carried)
        return planned

    def _spread(self, segments: Sequence[Segment]) -> list[PlannedRows]:
        lengths = [len(segment) for segment in segments]
        packed = pack_window(lengths, self._length, self._window)
        window = {
            _SCOPE: 1.0,
            "packing/window_fill": sum(lengths) / (self._length * len(packed)),
            "packing/window_total_len": float(sum(lengths)),
            "packing/window_segments": float(len(lengths)),
        }
        totals = [sum(lengths[i] for i in row) for row in packed]
        return [
            ([[segments[i] for i in row]], {**_row_figures(total, self._length, len(row), waiting=0), **window})
            for row, total in zip(packed, totals, strict=True)
        ]


@dataclass(frozen=True)
class StepRow:
    """A row of a whole optimizer step, with its figures. place: of its first segment in the step's list."""

    place: int
    segments: Row
    figures: Mapping[str, float]


class StepRowPlanner:
    """The rows of whole optimizer steps: few, nearly all of them known before the last segment is.

    `length` in tokens. What waits in a checkpoint of another scope goes into the first step.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._carried: list[Segment] = []

    @property
    def waiting(self) -> Sequence[Segment]:
        """The segments of a checkpoint that no step has begun with."""
        return tuple(self._carried)

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait for the next step."""
        self._carried += segments

    def rows(self, count: int, segments: Iterable[tuple[int, Segment]]) -> Iterator[StepRow]:
        """Yield the rows of a step of `count` records as soon as each is known, while segments come with their places.

        Which rows there are depends on the segments alone, and in which order they are known on when those come.

        Raises:
            PackingError: a segment is longer than a row.
        """
        carried, self._carried = self._carried, []
        planned = HalvedRows(self._length, len(carried) + count)
        later = ((len(carried) + place, segment) for place, segment in segments)
        held: dict[int, Segment] = {}
        for place, segment in chain(enumerate(carried), later):
            held[place] = segment
            for row in planned.add(place, len(segment)):
                yield self._row(row, held)
        for row in planned.finish():
            yield self._row(row, held)

    def _row(self, places: Sequence[int], held: dict[int, Segment]) -> StepRow:
        row = [held.pop(place) for place in places]
        total = sum(len(one) for one in row)
        return StepRow(places[0], row, _row_figures(total, self._length, len(row), waiting=0))


def _row_figures(total: int, length: int, segments: int, *, waiting: int) -> dict[str, float]:
    return {
        "packing/post_rollout_fill": total / length,
        "packing/post_rollout_selected_total_len": float(total),
        "packing/post_rollout_segments": float(segments),
        "packing/post_rollout_buffer": float(waiting),
    }
