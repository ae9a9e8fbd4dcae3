"""The story of an optimizer step: sync, ask, match, supervise, pack, and train row by row.

    steps.begin(batches)                      # raw records; their rollouts may serve several steps
    for group in steps.rows():                # sync(); ask(batch); supervise(match(answer)); pack(segments)
        loss(group).backward()                # as soon as the rows are known

The loss is a mean over each micro-step, over an accumulation window, or over the whole step (scope `step`). The mean
over a step needs counts that are known when the last answer is there. Rows that are known earlier train at once where
memory allows: one backward pass for each sum of the loss, whose gradients are divided later (`EarlyGradients`). When a
row trains changes the order of these sums and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import AskedStep, Batches, EStep
from stage2_trainer.learner.loss import LossParts, denominators, window_means
from stage2_trainer.learner.padding_free_batch import Segment, supervised_counts
from stage2_trainer.learner.passes import EarlyGradients
from stage2_trainer.learner.rows import RowGroup, RowPlanner
from stage2_trainer.matching import CoordVocab
from stage2_trainer.process.ranks import gathered
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import TIMELINE, Stopwatch

Batch = Mapping[str, Any]  # the tensors of a row group, see `supervised_batch`
Mean = Literal["micro", "window", "step"]


class Passes(Protocol):
    """The forward and backward passes of a trainer."""

    @property
    def early(self) -> EarlyGradients | None:
        """The gradients of rows that train before the step's counts are known; None: rows wait for all answers."""
        ...

    def lay_out(self, group: RowGroup) -> dict[str, Any]:
        """Return the tensors of some rows."""
        ...

    def train_rows(self, group: RowGroup, batch: Batch, *, last: bool) -> LossParts:
        """Run a forward and a backward pass. last: gradients are reduced over processes. All processes call it."""
        ...

    def train_rows_early(self, group: RowGroup, batch: Batch) -> LossParts:
        """Run a forward pass, and a backward pass for either sum of the loss, into `early`."""
        ...


def train_step(
    steps: Steps, passes: Passes, stopwatch: Stopwatch, vocab: CoordVocab, *, mean: Mean
) -> tuple[list[RowGroup], list[torch.Tensor]]:
    """Train one optimizer step: gradients are with the parameters when it returns.

    Returns:
        The row groups by their places, and the figures of losses, (5,) as `LOSS_FIGURES`: one for each group, or one
        for a mean over the whole step. All processes call it.
    """
    rows = _timed(steps.rows(stopwatch))
    if mean == "step":
        return _train_whole_step(rows, steps, passes, vocab)
    return _train_micro_steps(rows, steps, passes, over_window=mean == "window")


def _train_micro_steps(
    rows: Iterator[RowGroup], steps: Steps, passes: Passes, *, over_window: bool
) -> tuple[list[RowGroup], list[torch.Tensor]]:
    """Train on each micro-step as soon as its rows are known, or once all are, where the mean is over the window."""
    laid_out: Iterable[tuple[RowGroup, dict[str, Any]]] = ((group, passes.lay_out(group)) for group in rows)
    if over_window:
        laid_out = list(laid_out)
        targets = window_means([batch["targets"] for _, batch in laid_out])
        for (_, batch), divided in zip(laid_out, targets, strict=True):
            batch["targets"] = divided
    done: list[RowGroup] = []
    losses = []
    for group, batch in laid_out:
        done.append(group)
        losses.append(passes.train_rows(group, batch, last=len(done) == steps.raw_batches).figures())
    return done, losses


def _train_whole_step(
    rows: Iterator[RowGroup], steps: Steps, passes: Passes, vocab: CoordVocab
) -> tuple[list[RowGroup], list[torch.Tensor]]:
    """Train on rows as they are known while answers are awaited, and on the others once the counts are known.

    Processes with fewer rows than others repeat their shortest with a loss of zero: all make as many passes.
    """
    loss, counts = StepLoss(), [0, 0]
    done: list[RowGroup] = []
    left: list[RowGroup] = []
    for group in rows:
        done.append(group)
        if passes.early is None or steps.all_in:
            left.append(group)
            continue
        parts = passes.train_rows_early(group, passes.lay_out(group))
        loss.add(parts, ce=1.0, coord=1.0)
        _count(counts, (parts.ce_count, parts.coord_prefix_count + parts.coord_tail_count))
    for group in left:
        _count(counts, supervised_counts(group.rows[0], vocab))
    ce, coord = denominators((counts[0], counts[1]))
    if passes.early is not None:
        passes.early.apply(ce, coord)
    left.sort(key=_place)
    count = max(gathered(len(left)))
    shortest = min(left, key=lambda group: sum(map(len, group.rows[0])))
    for index in range(count):
        repeats = index >= len(left)
        group = shortest if repeats else left[index]
        batch = passes.lay_out(group)
        share = float("inf") if repeats else 1.0
        batch["targets"] = batch["targets"].divided_by(ce=ce * share, coord=coord * share)
        parts = passes.train_rows(group, batch, last=index == count - 1)
        if not repeats:
            loss.add(parts, ce=ce, coord=coord)
    return sorted(done, key=_place), [loss.figures(ce, coord)]


def _timed(rows: Iterator[RowGroup]) -> Iterator[RowGroup]:
    """Note on the timeline how long each group was waited for."""
    while True:
        with TIMELINE.measure("wait"):
            group = next(rows, None)
        if group is None:
            return
        yield group


class Steps:
    """The optimizer steps of a run, in order; each trains on fresh rollouts, or once more on kept ones."""

    def __init__(self, estep: EStep, planner: RowPlanner) -> None:
        self._estep = estep
        self._planner = planner
        self._kept = ReuseBuffer()
        self._batches: Batches = ()
        self._following: Batches = ()
        self._global_step = -1
        self._waited: Sequence[Segment] = ()
        self._asked: AskedStep | None = None
        self.report: SyncReport | None = None
        """The sync before the step's rollouts."""
        self.reused: int | None = None
        """The number of steps that trained on these rollouts before; None = they are fresh."""

    def begin(self, batches: Batches, following: Batches = (), *, global_step: int, uses: int) -> None:
        """Begin a step on these raw batches, whose rollouts `uses` steps train on, this one included.

        following: the raw batches of the next step, where rollouts are requested one step ahead.

        Raises:
            ReuseError: the rollouts of other batches are kept for this step.
        """
        self._batches, self._following, self._global_step = batches, following, global_step
        self._asked = self.report = None
        self.reused = self._kept.begin(global_step, [one for batch in batches for one in batch], uses=uses)
        if self.reused is None:
            self._waited = self._planner.waiting

    def rows(self, stopwatch: Stopwatch) -> Iterator[RowGroup]:
        """Yield the rows of the step, each group as soon as it is known; sync and ask for rollouts where none are kept.

        Raises:
            ServerError: servers were lost, and did not come back.
            PackingError: segments do not fit their rows.
            TooManyBadSamples, BadStepError, Exception: as `BadSamples.note`.
        """
        if self.reused is not None:
            yield from self._kept.groups
            return
        asked = self._asked = self._estep.begin(
            self._batches, self._following, global_step=self._global_step, stopwatch=stopwatch
        )
        groups = []
        for group in self._planner.rows(asked):
            groups.append(group)
            yield group
        self.report = asked.report
        self._kept.keep(groups)

    @property
    def raw_batches(self) -> int:
        """The number of raw batches of the step."""
        return len(self._batches)

    @property
    def step0(self) -> int:
        """The optimizer step that asked for the rollouts."""
        return self._global_step - (self.reused or 0)

    @property
    def all_in(self) -> bool:
        """Whether no rollout of the step is awaited any more."""
        return self.reused is not None or (self._asked is not None and self._asked.all_in)

    def waiting(self, global_step: int) -> Sequence[Segment]:
        """Return the segments that wait for a row in a run that resumes at `global_step`.

        Where that step is under way, or reuses rollouts, such a run makes its rollouts again: those wait that waited
        before it.
        """
        under_way = self._global_step == global_step
        return self._waited if under_way or self._kept.serves(global_step) else self._planner.waiting


class StepLoss:
    """The loss of a whole step, row by row: this process's share, whose mean over processes is that of the step."""

    def __init__(self) -> None:
        self._rows: list[tuple[LossParts, float, float]] = []

    def add(self, parts: LossParts, *, ce: float, coord: float) -> None:
        """Add a row, whose parts are sums over `ce` and `coord`."""
        self._rows.append((parts, ce, coord))

    def figures(self, ce: float, coord: float) -> torch.Tensor:
        """Return the record's `loss` and `loss/*` of a step with these denominators, (5,) as `LOSS_FIGURES`."""
        ordinary = _sum([parts.ce * (share / ce) for parts, share, _ in self._rows])
        coords = _sum([parts.coord * (share / coord) for parts, _, share in self._rows])
        prefix = self._mean(lambda parts: (parts.coord_prefix, parts.coord_prefix_count))
        tail = self._mean(lambda parts: (parts.coord_tail, parts.coord_tail_count))
        return torch.stack([ordinary + coords, ordinary, coords, prefix, tail])

    def _mean(self, part: Callable[[LossParts], tuple[torch.Tensor, int]]) -> torch.Tensor:
        found = [part(parts) for parts, _, _ in self._rows]
        count = max(sum(count for _, count in found), 1)
        return _sum([mean * (share / count) for mean, share in found])


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(values)).sum()


class ReuseBuffer:
    """The rows of one step's rollouts, for the steps that train on them again (semantics, section 9).

    Empty after a start, and whenever a step comes that cannot reuse them. What is kept is never changed: each step lays
    out tensors of its own.
    """

    def __init__(self) -> None:
        self._kept: _KeptStep | None = None

    def begin(self, global_step: int, records: Sequence[Record], *, uses: int) -> int | None:
        """Begin an optimizer step; return how many steps have trained on what is kept for it.

        None: rollouts must be made; `keep` takes their rows, for `uses` steps in all.

        Raises:
            ReuseError: the rows are those of other records.
        """
        kept, mine = self._kept, fingerprint(records)
        if kept is None or not self.serves(global_step):
            self._kept = _KeptStep(global_step, uses, mine)
            return None
        if kept.fingerprint != mine:
            raise ReuseError(
                f"step {global_step}: its records are not those whose rollouts of step {kept.step0} are kept; the "
                "dataloader repeats other windows than the learner accumulates"
            )
        return global_step - kept.step0

    def keep(self, groups: Sequence[RowGroup]) -> None:
        """Keep the rows of the step that has begun."""
        assert self._kept is not None, "a step has begun"
        self._kept.groups = sorted(groups, key=_place)

    @property
    def groups(self) -> Sequence[RowGroup]:
        """The kept rows, by their places."""
        assert self._kept is not None, "a step has begun"
        assert self._kept.groups is not None, "and was kept"
        return self._kept.groups

    def serves(self, global_step: int) -> bool:
        """Whether a step may train on what is kept."""
        kept = self._kept
        return kept is not None and kept.groups is not None and 0 < global_step - kept.step0 < kept.uses


@dataclass
class _KeptStep:
    step0: int
    uses: int
    fingerprint: str
    groups: Sequence[RowGroup] | None = None


class ReuseError(RuntimeError):
    """The dataloader and the kept rollouts are out of step: a defect of the learner, not of a configuration."""


def fingerprint(records: Sequence[Record]) -> str:
    """Return the SHA-1 of the indices and names of some records."""
    names = json.dumps([[record.index, record.sample_id] for record in records])
    return hashlib.sha1(names.encode(), usedforsecurity=False).hexdigest()


def _place(group: RowGroup) -> int:
    return group.place


def _count(counts: list[int], more: tuple[int, int]) -> None:
    counts[0] += more[0]
    counts[1] += more[1]
