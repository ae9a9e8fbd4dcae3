"""One optimizer step up to its gradients: sync, request, parse, match, build targets, pack, forward and backward.

    step.set_batches(batches)                 # raw records; their rollouts may serve several steps
    for group in step.rows():                 # lazy: the first group syncs weights and requests all rollouts;
                                              # segment = encode(build_target(match(parse(answer)), record));
                                              # rows = pack(segments)
        passes.train_rows(group)              # loss(row).backward(), when the mean below is known

The loop then checks, clips and steps the optimizer. The loss is a mean:

- `micro`: over each micro-step.
- `window`: over the optimizer step, rows as the planner made them.
- `step`: the same, with rows packed over the whole step (`post_rollout_pack_scope: step`).

The mean over a step needs token counts that are known only once the last answer has arrived. With `step`, if there is
one process, no fp16, and memory for a second set of gradients, rows train as soon as they are known: one backward pass
for each of the loss's two undivided sums (cross entropy of ordinary tokens, loss of coordinates), divided later
(`passes.EarlyGradients`). That changes the order in which gradients are added, and the loss by no more than its
rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import torch

from stage2_trainer.learner.estep import EStep, RawBatches, StepAnswers
from stage2_trainer.learner.loss import LossFigures, LossParts, denominators, window_means
from stage2_trainer.learner.padding_free_batch import Segment
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.rows import RowGroup, RowPlanner
from stage2_trainer.process.ranks import gathered
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import TIMELINE, Stopwatch

Mean = Literal["micro", "window", "step"]


def train_step(
    step: CurrentStep, passes: RowPasses, stopwatch: Stopwatch, *, mean: Mean, divisor: float
) -> tuple[list[RowGroup], list[LossFigures]]:
    """Train one optimizer step: gradients are with the parameters when it returns.

    divisor: by which the loss of each micro-step is divided.

    Returns:
        The row groups by their places, without repeated ones, and their losses: one entry for each group, or one for a
        mean over the whole step. All processes call it.
    """
    rows = _timed(step.rows(stopwatch))
    if mean == "step":
        return _train_whole_step(rows, step, passes)
    return _train_micro_steps(rows, step, passes, window=divisor if mean == "window" else None)


def _timed(rows: Iterator[RowGroup]) -> Iterator[RowGroup]:
    """Note on the timeline how long the step waits for each group."""
    while True:
        with TIMELINE.measure("wait"):
            group = next(rows, None)
        if group is None:
            return
        yield group


def _train_micro_steps(
    rows: Iterator[RowGroup], step: CurrentStep, passes: RowPasses, *, window: float | None
) -> tuple[list[RowGroup], list[LossFigures]]:
    """Train on each micro-step as soon as its rows are known, or, if a plan or a mean needs all of them, once all are.

    There is one group for each raw batch. window: by which each loss is divided, if the mean is over the
    window; None: each micro-step has a mean of its own.
    """
    laid_out: Iterable[tuple[RowGroup, dict[str, Any]]] = ((group, passes.lay_out(group)) for group in rows)
    count = step.raw_batch_count
    if window is not None or step.plans_ahead:
        together = laid_out = list(laid_out)
        count = len(together)
    if window is not None:
        targets = window_means([batch["targets"] for _, batch in together], window)
        for (_, batch), divided in zip(together, targets, strict=True):
            batch["targets"] = divided
    done: list[RowGroup] = []
    losses = []
    for number, (group, batch) in enumerate(laid_out, start=1):
        parts = passes.train_rows(group, batch, last=number == count)
        if not group.repeated:
            done.append(group)
            losses.append(parts.figures())
    return sorted(done, key=attrgetter("place")), losses


def _train_whole_step(
    rows: Iterator[RowGroup], step: CurrentStep, passes: RowPasses
) -> tuple[list[RowGroup], list[LossFigures]]:
    """Train on rows as they are known while answers are awaited, and on the others once the counts are known.

    Processes with fewer rows than others repeat their shortest without a loss: all make as many passes. Each group has
    one row, and the last rows are known only with the last answer, so some are always left.
    """
    trained: list[tuple[LossParts, float, float]] = []  # the sums of a row, and what they are divided by already
    counts: list[tuple[int, int]] = []
    done: list[RowGroup] = []
    left: list[RowGroup] = []
    for group in rows:
        done.append(group)
        if passes.early is None or step.all_arrived:
            left.append(group)
            continue
        parts = passes.train_rows_early(group, passes.lay_out(group))
        trained.append((parts, 1.0, 1.0))
        counts.append((parts.ce_count, parts.coord_prefix_count + parts.coord_tail_count))
    shortest = replace(min(left, key=attrgetter("tokens")), repeated=True)
    left += [shortest] * (max(gathered(len(left))) - len(left))
    # Laid out before anything is counted: an image may be lost only then, and its sample is taught nothing.
    laid_out = [(group, passes.lay_out(group)) for group in sorted(left, key=attrgetter("repeated", "place"))]
    counts += [(len(batch["targets"].labels), len(batch["targets"].bins)) for _, batch in laid_out]
    ce, coord = denominators((sum(tokens for tokens, _ in counts), sum(coords for _, coords in counts)))
    if passes.early is not None:
        passes.early.apply(ce, coord)
    for number, (group, batch) in enumerate(laid_out, start=1):
        divided = {**batch, "targets": batch["targets"].divided_by(ce=ce, coord=coord)}
        parts = passes.train_rows(group, divided, last=number == len(laid_out))
        trained.append((parts, ce, coord))
    done = sorted((group for group in done if not group.repeated), key=attrgetter("place"))
    return done, [_whole_step_figures(trained, ce, coord)]


def _whole_step_figures(trained: Sequence[tuple[LossParts, float, float]], ce: float, coord: float) -> LossFigures:
    """Return this process's share of the step's losses: their mean over processes is the step's.

    trained: the loss parts of each row, and what its two sums are divided by already.
    """
    rows = [parts.figures() for parts, _, _ in trained]
    ordinary = _sum([parts.ce * (divided_by / ce) for parts, divided_by, _ in trained])
    coords = _sum([parts.coord * (divided_by / coord) for parts, _, divided_by in trained])
    prefix, tail = (_sum([row.values[place] for row in rows]) for place in (3, 4))
    return LossFigures(
        torch.stack([ordinary + coords, ordinary, coords, prefix, tail]),
        ce_count=sum(row.ce_count for row in rows),
        prefix_count=sum(row.prefix_count for row in rows),
        tail_count=sum(row.tail_count for row in rows),
    )


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(values)).sum()


class CurrentStep:
    """The current optimizer step of a run, which trains on fresh rollouts, or once more on kept ones."""

    def __init__(self, estep: EStep, planner: RowPlanner) -> None:
        self._estep = estep
        self._planner = planner
        self._kept = KeptRows(-1, 0, [])
        self._batches: RawBatches = ()
        self._following: RawBatches = ()
        self._global_step = -1
        self._waited: Sequence[Segment] = ()
        self._answers: StepAnswers | None = None
        self.report: SyncReport | None = None
        """The sync before the step's rollouts."""
        self.reused: int | None = None
        """The number of steps that trained on these rollouts before; None = they are fresh."""

    def set_batches(self, batches: RawBatches, following: RawBatches = (), *, global_step: int, uses: int) -> None:
        """Set the raw batches of the next step. uses: how many steps train on their rollouts if these are fresh.

        following: the raw batches of the next step, where rollouts are requested one step ahead.

        Raises:
            RuntimeError: the kept rollouts are those of other records, so the dataloader is out of step.
        """
        self._batches, self._following, self._global_step = batches, following, global_step
        self._answers = self.report = None
        records = [(one.index, one.sample_id) for batch in batches for one in batch]
        if not self._kept.serves(global_step):
            self._kept = KeptRows(global_step, uses, records)
            self.reused, self._waited = None, self._planner.waiting
        elif self._kept.records == records:
            self.reused = global_step - self._kept.step0
        else:
            raise RuntimeError(
                f"step {global_step}: these records differ from those whose rollouts were kept at step "
                f"{self._kept.step0}; the dataloader does not repeat the windows that the learner accumulates"
            )

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
        answers = self._answers = self._estep.sync_and_request(
            self._batches, self._following, global_step=self._global_step, stopwatch=stopwatch
        )
        groups = []
        for group in self._planner.rows(answers):
            groups.append(group)
            yield group
        self.report = answers.report
        self._kept.groups = sorted(groups, key=attrgetter("place"))

    @property
    def plans_ahead(self) -> bool:
        """Whether all rows of the step are known before the first is trained on."""
        return self._planner.plans_ahead

    @property
    def raw_batch_count(self) -> int:
        """The number of raw batches of the step."""
        return len(self._batches)

    @property
    def step0(self) -> int:
        """The optimizer step that asked for the rollouts."""
        return self._global_step - (self.reused or 0)

    def reuse_figures(self) -> dict[str, float]:
        """Return the `rollout/buffer_*` figures of the step."""
        return {
            "rollout/buffer_reuse": float(self.reused is not None),
            "rollout/buffer_window_step0": float(self.step0),
            "rollout/buffer_completed_steps": float(self.reused or 0),
        }

    @property
    def all_arrived(self) -> bool:
        """Whether all rollouts of the step have arrived."""
        return self.reused is not None or (self._answers is not None and self._answers.all_arrived)

    def waiting(self, global_step: int) -> Sequence[Segment]:
        """Return the segments that wait for a row in a run that resumes at `global_step`.

        If that step is under way or reuses rollouts, the resumed run generates them again, so these are the segments
        that waited before they were requested.
        """
        under_way = self._global_step == global_step
        return self._waited if under_way or self._kept.serves(global_step) else self._planner.waiting


@dataclass
class KeptRows:
    """The rows of one step's rollouts, for `uses` steps in all from `step0` on (semantics, section 9).

    Each step lays out tensors of its own, so the groups never change; there are none before the step has all its rows.
    """

    step0: int
    uses: int
    records: list[tuple[int, str]]
    groups: Sequence[RowGroup] = ()

    def serves(self, global_step: int) -> bool:
        """Whether a step may train on them."""
        return bool(self.groups) and 0 < global_step - self.step0 < self.uses
