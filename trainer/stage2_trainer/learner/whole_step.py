"""Training on the rows of a whole optimizer step (scope `step`), the first of them while others are still being made.

The loss is a mean over all supervised tokens of the step, ordinary ones and coordinates each, in all learner processes.
Rows that come before these counts are known are trained on by two backward passes, one for either sum: the gradients
are kept apart and divided once the last answer is there. All other rows need one. When a row comes changes the order of
these sums, and nothing else: what dropout draws follows from a row's place in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stage2_trainer.learner.early_gradients import EarlyGradients
from stage2_trainer.learner.loss import LossParts
from stage2_trainer.learner.loss_targets import LossTargets, denominators
from stage2_trainer.learner.microsteps import MicroStep
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.matching import CoordVocab, packed_supervision
from stage2_trainer.matching.masks import IGNORED
from stage2_trainer.process.ranks import gathered
from stage2_trainer.telemetry.timeline import TIMELINE

Batch = Mapping[str, Any]  # what `supervised_batches` makes of a row


@dataclass(frozen=True)
class RowTraining:
    """What a trainer does with one row.

    lay_out: makes tensors of it. train: forward and backward pass, and what came of it. sums: forward pass up to the
    two sums of the loss, ordinary tokens and coordinates, with what is told of them; `note` is to be told of it once
    their gradients are there. apart: leaves gradients in this
    process, for a pass after which others follow; the last pass is made without it. draws: lets a pass draw what its
    place in the step says. check: called in all processes before each pass; it may raise.
    """

    lay_out: Callable[[Sequence[Segment]], dict[str, Any]]
    train: Callable[[Batch], LossParts]
    sums: Callable[[Batch], tuple[LossParts, LossParts]]
    note: Callable[[Batch, LossParts], None]
    apart: Callable[[], AbstractContextManager[object]]
    draws: Callable[[int], AbstractContextManager[object]]
    check: Callable[[], None]


class StepLoss:
    """What is told of a step's loss: one entry for this process, whose mean over processes is that of the step."""

    def __init__(self) -> None:
        self._rows: list[tuple[LossParts, float, float]] = []

    def add(self, parts: LossParts, *, ce: float, coord: float) -> None:
        """Add a row, whose parts are sums over `ce` and `coord`."""
        self._rows.append((parts, ce, coord))

    def figures(self, ce: float, coord: float) -> torch.Tensor:
        """Return the record's `loss` and `loss/*`, of a step with these denominators, (5,) as `LOSS_FIGURES`."""
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


def train_step(
    rows: Iterator[MicroStep],
    training: RowTraining,
    vocab: CoordVocab,
    *,
    early: EarlyGradients | None,
    all_in: Callable[[], bool],
) -> tuple[list[MicroStep], torch.Tensor]:
    """Train on a step's rows, and return them by their places and the figures of their loss, as `StepLoss` has them.

    early: where gradients of rows go that are trained on before `all_in` says that no answer is waited for; None: all
    answers are waited for first. Processes with fewer rows than others train on one again with no loss, so that all
    make as many passes.
    """
    told, counts, taken, left = StepLoss(), [0, 0], [], []
    for row in rows:
        taken.append(row)
        if early is None or all_in():
            left.append(row)
            continue
        batch = training.lay_out(row.rows[0])
        with training.draws(row.place):
            ordinary, coords = training.sums(batch)
            with TIMELINE.measure("backward"):
                early.add(ordinary.total, coords.total)
                training.note(batch, _joined(ordinary, coords))
        told.add(_joined(ordinary, coords), ce=1.0, coord=1.0)
        _count(counts, (ordinary.ce_count, coords.coord_prefix_count + coords.coord_tail_count))
    for row in left:
        _count(counts, supervised_counts(row.rows[0], vocab))
    ce, coord = denominators((counts[0], counts[1]))
    if early is not None:
        early.apply(ce, coord)
    _train_rest(sorted(left, key=_place), training, told, ce, coord)
    return sorted(taken, key=_place), told.figures(ce, coord)


def _place(row: MicroStep) -> int:
    return row.place


def _train_rest(rows: Sequence[MicroStep], training: RowTraining, told: StepLoss, ce: float, coord: float) -> None:
    passes = max(gathered(len(rows)))
    shortest = min(rows, key=lambda row: sum(len(segment) for segment in row.rows[0]))
    for index in range(passes):
        training.check()
        silent = index >= len(rows)
        row = shortest if silent else rows[index]
        batch = training.lay_out(row.rows[0])
        targets: LossTargets = batch["targets"]
        share = float("inf") if silent else 1.0
        batch["targets"] = targets.divided_by(ce=ce * share, coord=coord * share)
        last = index == passes - 1
        with training.draws(row.place), nullcontext() if last else training.apart():
            parts = training.train(batch)
        if not silent:
            told.add(parts, ce=ce, coord=coord)


def supervised_counts(row: Sequence[Segment], vocab: CoordVocab) -> tuple[int, int]:
    """Return how many ordinary tokens and how many coordinates of a row are supervised."""
    ids = torch.cat([segment.placed.encoding.input_ids for segment in row]).numpy()
    found = packed_supervision([segment.meta for segment in row], ids, vocab)
    return int((found.labels != IGNORED).sum()), len(found.coord_positions)


def _count(counts: list[int], more: tuple[int, int]) -> None:
    counts[0] += more[0]
    counts[1] += more[1]


def _joined(ordinary: LossParts, coords: LossParts) -> LossParts:
    """Return the parts of a row from those of its two sums."""
    return LossParts(
        total=ordinary.total.detach() + coords.total.detach(),
        ce=ordinary.ce,
        coord=coords.coord,
        coord_prefix=coords.coord_prefix,
        coord_tail=coords.coord_tail,
        ce_count=ordinary.ce_count,
        coord_prefix_count=coords.coord_prefix_count,
        coord_tail_count=coords.coord_tail_count,
    )
