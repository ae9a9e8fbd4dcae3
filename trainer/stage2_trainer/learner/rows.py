"""Which segments are trained on in a micro-step, and in which rows: packed into one, or each in a row of its own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from stage2_trainer.learner.estep import Segment
from stage2_trainer.learner.packing import PackingBuffer

logger = logging.getLogger(__name__)

Row = Sequence[Segment]


class Rows(Protocol):
    """Chooses the rows of a micro-step."""

    def choose(self, segments: Sequence[Segment]) -> tuple[list[Row], Mapping[str, float]]:
        """Return the rows to train on now that these segments are new, and the `packing/*` figures."""
        ...


class SingleRows:
    """Every segment in a row of its own (training.packing: false)."""

    def choose(self, segments: Sequence[Segment]) -> tuple[list[Row], Mapping[str, float]]:
        """Return a row for each segment."""
        return [[segment] for segment in segments], {}


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

    def choose(self, segments: Sequence[Segment]) -> tuple[list[Row], Mapping[str, float]]:
        """Return the one row that holds the oldest segment and is as full as can be."""
        self._buffer.insert(segments, [len(segment) for segment in segments])
        row = self._buffer.take()
        fill = row.total_len / self._length
        self._warn(fill)
        return [row.items], {
            "packing/post_rollout_fill": fill,
            "packing/post_rollout_selected_total_len": row.total_len,
            "packing/post_rollout_segments": len(row.items),
            "packing/post_rollout_buffer": len(self._buffer),
        }

    def _warn(self, fill: float) -> None:
        if fill < self._min_fill and not self._warned:
            self._warned = True
            logger.warning(
                "a packed row is %.0f %% full, below training.packing_min_fill_ratio = %g: "
                "raise training.per_device_train_batch_size or lower global_max_length",
                100 * fill,
                self._min_fill,
            )
