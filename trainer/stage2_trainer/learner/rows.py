"""The rows of a step: segments packed into rows as they come, or each in a row of its own.

Scope `micro` packs one row for each micro-step, and what does not fit waits; `window` spreads all segments of an
accumulation window over its micro-steps, and keeps only what a partial window leaves; `step` ignores micro-steps, and
keeps nothing. Segments that wait are kept with checkpoints, so a resumed run trains on them too, whatever its scope.
Source: semantics, sections 7 and 8.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from stage2_trainer.data.encode import Encoding
from stage2_trainer.learner.estep import StepAnswers
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import SegmentMeta
from stage2_trainer.model.tensor_files import WAITING, load_tensors
from stage2_trainer.packing import WAYS_TO_ROOM, HalvedRows, PackingBuffer, PackingError, pack_window
from stage2_trainer.process.ranks import rank, world_size
from stage2_trainer.rollouts.first_process import ProcessExchange

logger = logging.getLogger(__name__)

Row = Sequence[Segment]
PackedRows = tuple[list[Row], Mapping[str, float]]  # the rows of a micro-step, and its `packing/*` figures
_SCOPE = "packing/post_rollout_scope_window"
_TOO_EMPTY = (
    "a packed row is %.0f %% full, below training.packing_min_fill_ratio = %g: "
    "raise training.per_device_train_batch_size or lower global_max_length"
)
_TOO_MANY = "training.packing_buffer: %d segments wait for a row, and %d may, or the run ends; %s"


@dataclass(frozen=True)
class RowGroup:
    """The rows of one forward and backward pass, with their `packing/*` figures.

    place: the group's number in the step, whenever its rows were known. samples: the figures of the segments that are
    new in this micro-step; with scope `step`, of those in the row. repeated: another process trains on it, or an
    earlier pass; here it has a loss of zero, so that all processes make as many passes.
    """

    place: int
    rows: Sequence[Row]
    figures: Mapping[str, float]
    samples: Sequence[SampleStats]
    repeated: bool = False

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(len(segment) for row in self.rows for segment in row)


class RowPlanner(ABC):
    """Lays out the rows of a run's steps."""

    plans_ahead = False
    """Whether all rows of a step are known before the first is trained on."""
    whole_step = False
    """Whether rows belong to no micro-step, but to the whole optimizer step."""

    @property
    def waiting(self) -> Sequence[Segment]:
        """The waiting segments, oldest first."""
        return ()

    @abstractmethod
    def wait(self, segments: Sequence[Segment]) -> None:
        """Append segments of a checkpoint to the waiting ones. Raises PackingError as `rows`."""

    @abstractmethod
    def rows(self, step: StepAnswers) -> Iterator[RowGroup]:
        """Yield the rows of a step, each group as soon as it is known. Raises PackingError."""


class MicroStepPlanner(RowPlanner):
    """A planner of one group of rows for each micro-step."""

    def rows(self, step: StepAnswers) -> Iterator[RowGroup]:
        """Yield the rows of each micro-step."""
        micro_steps = step.micro_steps()
        together = [list(micro_steps)] if self.plans_ahead else ([one] for one in micro_steps)
        place = 0
        for some in together:
            with step.stopwatch.measure("post_rollout_pack"):
                planned = self.plan(some)
            for (rows, figures), new in zip(planned, some, strict=True):
                yield RowGroup(place, rows, figures, [segment.stats for segment in new])
                place += 1

    @abstractmethod
    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PackedRows]:
        """Return the rows of each of these micro-steps, whose segments are new."""


class SingleRowPlanner(MicroStepPlanner):
    """Every segment in a row of its own (training.packing: false)."""

    def wait(self, segments: Sequence[Segment]) -> None:
        """Refuse: no segment waits.

        Raises:
            PackingError: always.
        """
        raise PackingError(
            f"{len(segments)} segments of the checkpoint wait for a packed row, and training.packing is false; "
            "resume with the configuration that the checkpoint was written with"
        )

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PackedRows]:
        """Return a row for each segment."""
        return [([[segment] for segment in segments], {}) for segments in micro_steps]


class PackedRowPlanner(MicroStepPlanner):
    """One row for each micro-step; what does not fit waits for the next one.

    `length` in tokens; below a share of `min_fill` a warning is logged, once; `capacity`: the maximum number of
    waiting segments: another warning comes once more than half of them wait.
    Raises PackingError when a segment is longer than a row, or too many wait.
    """

    def __init__(self, length: int, *, capacity: int, min_fill: float) -> None:
        self._length = length
        self._min_fill = min_fill
        self._capacity = capacity
        self._buffer: PackingBuffer[Segment] = PackingBuffer(packing_length=length, capacity=capacity)
        self._warned: set[str] = set()

    @property
    def waiting(self) -> Sequence[Segment]:
        """The waiting segments, oldest first."""
        return self._buffer.items

    def wait(self, segments: Sequence[Segment]) -> None:
        """Append segments to the waiting ones. Raises PackingError as `plan`."""
        self._buffer.insert(segments, [len(segment) for segment in segments])

    def take_waiting(self) -> list[Segment]:
        """Remove and return the waiting segments, oldest first."""
        return self._buffer.empty()

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PackedRows]:
        """Return for each micro-step the one row that holds the oldest segment and is as full as can be."""
        return [self._next(segments) for segments in micro_steps]

    def _next(self, segments: Sequence[Segment]) -> PackedRows:
        self.wait(segments)
        row = self._buffer.take()
        if (fill := row.total_len / self._length) < self._min_fill:
            self._warn_once(_TOO_EMPTY, 100 * fill, self._min_fill)
        if len(self._buffer) > self._capacity // 2:
            self._warn_once(_TOO_MANY, len(self._buffer), self._capacity, WAYS_TO_ROOM)
        return [row.items], _row_figures(row.total_len, self._length, len(row.items), waiting=len(self._buffer))

    def _warn_once(self, text: str, *values: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text, *values)


class WindowRowPlanner(MicroStepPlanner):
    """One row for each micro-step of a window of `window` micro-steps; its segments are spread over them.

    The last window of an epoch may be partial: `partial` packs its micro-steps one by one, and the segments it leaves
    go into the next window with room for them. `length` in tokens. Raises PackingError when a window's own segments do
    not fit its rows, or a segment is longer than a row.
    """

    plans_ahead = True

    def __init__(self, length: int, *, window: int, partial: PackedRowPlanner) -> None:
        self._length = length
        self._window = window
        self._partial = partial

    @property
    def waiting(self) -> Sequence[Segment]:
        """The waiting segments of a partial window, oldest first."""
        return self._partial.waiting

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait for a window with room for them."""
        self._partial.wait(segments)

    def plan(self, micro_steps: Sequence[Sequence[Segment]]) -> list[PackedRows]:
        """Return exactly one row, never an empty one, for each micro-step."""
        if len(micro_steps) < self._window:
            return [(rows, {**figures, _SCOPE: 0.0}) for rows, figures in self._partial.plan(micro_steps)]
        segments = [segment for micro_step in micro_steps for segment in micro_step]
        carried = self._partial.take_waiting()
        try:
            return self._spread([*carried, *segments])
        except PackingError:
            if not carried:
                raise
        planned = self._spread(segments)
        self._partial.wait(carried)
        return planned

    def _spread(self, segments: Sequence[Segment]) -> list[PackedRows]:
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


class StepRowPlanner(RowPlanner):
    """Few rows for a whole optimizer step, most of them known before the last segment is.

    `length` in tokens. Segments that wait in a checkpoint of another scope go into the first step.
    """

    whole_step = True

    def __init__(self, length: int) -> None:
        self._length = length
        self._carried: list[Segment] = []

    @property
    def waiting(self) -> Sequence[Segment]:
        """Before the first step the segments that the checkpoint left waiting; none afterwards."""
        return tuple(self._carried)

    def wait(self, segments: Sequence[Segment]) -> None:
        """Let segments wait for the next step."""
        self._carried += segments

    def rows(self, step: StepAnswers) -> Iterator[RowGroup]:
        """Yield one row at a time; the rows depend on the segments alone, their order on when segments come.

        Raises:
            PackingError: a segment is longer than a row.
        """
        carried, self._carried = self._carried, []
        planned = HalvedRows(self._length, len(carried) + len(step))
        later = ((len(carried) + place, segment) for place, segment in step.as_they_come())
        held: dict[int, Segment] = {}
        for place, segment in chain(enumerate(carried), later):
            held[place] = segment
            for row in planned.add(place, len(segment)):
                yield self._row(row, held)
        for row in planned.finish():
            yield self._row(row, held)

    def _row(self, places: Sequence[int], held: dict[int, Segment]) -> RowGroup:
        row = [held.pop(place) for place in places]
        figures = _row_figures(sum(map(len, row)), self._length, len(row), waiting=0)
        return RowGroup(places[0], [row], figures, [segment.stats for segment in row])


class SharedRowPlanner(RowPlanner):
    """The rows of one process, divided by tokens among all learner processes (`vllm.server.learners: sharded`).

    The first process plans with `planner`, and so keeps what waits; each gets its groups, as many as any other.
    """

    plans_ahead = True

    def __init__(self, planner: RowPlanner, exchange: ProcessExchange) -> None:
        self._planner = planner
        self._exchange = exchange
        self.whole_step = planner.whole_step

    @property
    def waiting(self) -> Sequence[Segment]:
        """The waiting segments, oldest first; all are in the first process."""
        return self._planner.waiting

    def wait(self, segments: Sequence[Segment]) -> None:
        """Append segments of a checkpoint to the waiting ones. Raises PackingError."""
        self._planner.wait(segments)

    def rows(self, step: StepAnswers) -> Iterator[RowGroup]:
        """Yield this process's groups once all segments are known. Raises PackingError in all processes."""
        step.collect(self._exchange.shares(step.own_segments))

        yield from self._exchange.one_each(lambda: divided(list(self._planner.rows(step)), world_size()))


def divided(groups: Sequence[RowGroup], processes: int) -> list[list[RowGroup]]:
    """Divide the groups of a step by tokens: the longest first, each to the process with the fewest tokens so far.

    No process gets more than its share by number, because all make as many passes; where one lacks a group, it repeats
    the shortest.
    """
    shares: list[list[RowGroup]] = [[] for _ in range(processes)]
    tokens = [0] * processes
    most = -(-len(groups) // processes)
    for group in sorted(groups, key=lambda one: (-one.tokens, one.place)):
        least = min((i for i in range(processes) if len(shares[i]) < most), key=tokens.__getitem__)
        shares[least].append(group)
        tokens[least] += group.tokens
    shortest = replace(min(groups, key=lambda one: (one.tokens, one.place)), repeated=True)
    return [[*share, *[shortest] * (most - len(share))] for share in shares]


def _row_figures(total: int, length: int, segments: int, *, waiting: int) -> dict[str, float]:
    return {
        "packing/post_rollout_fill": total / length,
        "packing/post_rollout_selected_total_len": float(total),
        "packing/post_rollout_segments": float(segments),
        "packing/post_rollout_buffer": float(waiting),
    }


PARTS: list[Any] = [Segment, Placed, Encoding, SegmentMeta, SampleStats]
"""The classes of a waiting segment; a checkpoint may hold no other."""


def save_waiting(folder: Path, segments: Sequence[Segment]) -> None:
    """Write this process's waiting segments into a checkpoint's folder; nothing where none waits."""
    if segments:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(list(segments), folder / f"{WAITING}{rank():05d}.pt")


def load_waiting(folder: Path, *, all_in_first: bool = False) -> list[Segment]:
    """Return the waiting segments of a checkpoint, shared out among as many processes as there are now.

    all_in_first: the first process gets all of them.

    Raises:
        ConfigError: a file holds other classes; nothing of it is loaded or run.
    """
    files = sorted(folder.glob(f"{WAITING}*.pt"))
    files = files[rank() :: world_size()] if not all_in_first else files if rank() == 0 else []
    return [one for file in files for one in load_tensors(file, PARTS, path="training.resume_from_checkpoint")]
