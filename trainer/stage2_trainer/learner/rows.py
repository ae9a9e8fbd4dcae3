"""Which segments are trained on in a micro-step, and in which rows: packed into one, or each in a row of its own.

Packing looks at the micro-steps that it is given: at one (scope `micro`, what does not fit waits for the next), or at a
whole accumulation window (scope `window`, nothing waits).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from stage2_trainer.learner.estep import Segment
from stage2_trainer.learner.packing import PackingBuffer, pack_window

logger = logging.getLogger(__name__)

Row = Sequence[Segment]
Planned = tuple[list[Row], Mapping[str, float]]  # the rows of a micro-step, and its `packing/*` figures


class Rows(Protocol):
    """Chooses the rows of micro-steps."""

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[Planned]:
        """Return what to train on in each of these micro-steps, now that their segments are new."""
        ...


class SingleRows:
    """Every segment in a row of its own (training.packing: false)."""

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[Planned]:
        """Return a row for each segment."""
        return [([[segment] for segment in segments], {}) for segments in micro_steps]


class WindowRows:
    """One row for each micro-step, all segments of the window spread over them; none waits, none is dropped.

    `length` in tokens. Raises PackingError when there is no way to spread them, or a segment is longer than a row.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[Planned]:
        """Return exactly one row, never an empty one, for each micro-step."""
        segments = [segment for micro_step in micro_steps for segment in micro_step]
        lengths = [len(segment) for segment in segments]
        packed = pack_window(lengths, self._length, len(micro_steps))
        window = {
            "packing/post_rollout_scope_window": 1.0,
            "packing/window_fill": sum(lengths) / (self._length * len(packed)),
            "packing/window_total_len": float(sum(lengths)),
            "packing/window_segments": float(len(lengths)),
        }
        totals = [sum(lengths[i] for i in row) for row in packed]
        return [
            ([[segments[i] for i in row]], {**_row_figures(total, self._length, len(row), waiting=0), **window})
            for row, total in zip(packed, totals, strict=True)
        ]


class PackedRows:
    """One row for each micro-step; what does not fit waits for the next one.

    `length` in tokens; `min_fill` is the share of it below which a person is warned, once; `capacity` is how many
    segments may wait. Raises PackingError when a segment is longer than a row, or too many wait.
    """

    def __init__(self, length: int, *, capacity: int, min_fill: float) -> None:
        self._length = length
        self._min_fill = min_fill
        self._buffer: PackingBuffer[Segment] = PackingBuffer(packing_length=length, capacity=capacity)
        self._warned = False

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[Planned]:
        """Return for each micro-step the one row that holds the oldest segment and is as full as can be."""
        return [self._next(segments) for segments in micro_steps]

    def _next(self, segments: Sequence[Segment]) -> Planned:
        self._buffer.insert(segments, [len(segment) for segment in segments])
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


def _row_figures(total: int, length: int, segments: int, *, waiting: int) -> dict[str, float]:
    return {
        "packing/post_rollout_fill": total / length,
        "packing/post_rollout_selected_total_len": float(total),
        "packing/post_rollout_segments": float(segments),
        "packing/post_rollout_buffer": float(waiting),
    }
