"""The passes of an optimizer step: which one is the last, and whose figures count."""

from types import SimpleNamespace

import pytest
import torch

from stage2_trainer.learner.rows import RowGroup
from stage2_trainer.learner.step import train_step
from stage2_trainer.telemetry.timeline import Stopwatch


class Step:
    """A step of four raw batches whose rows are known beforehand."""

    raw_batch_count = 4

    def __init__(self, groups, *, plans_ahead):
        self._groups, self.plans_ahead = groups, plans_ahead

    def rows(self, _):
        yield from self._groups


class Passes:
    """Passes that train on nothing. last: whether each was the last one."""

    def __init__(self):
        self.last = []

    def lay_out(self, group):
        return {"targets": group.place}

    def train_rows(self, group, batch, *, last):
        self.last.append(last)
        return SimpleNamespace(figures=lambda: torch.full((5,), float(group.place)))


def group(place, *, repeated=False):
    return RowGroup(place, [], {}, [], repeated=repeated)


def trained(groups, *, plans_ahead):
    passes = Passes()
    step = Step(groups, plans_ahead=plans_ahead)
    done, losses = train_step(step, passes, Stopwatch(), mean="micro", divisor=1.0)
    return [one.place for one in done], [float(one[0]) for one in losses], passes.last


@pytest.mark.parametrize(("count", "plans_ahead"), [(4, False), (4, True), (2, True)])
def test_gradients_are_reduced_only_in_last_pass(count, plans_ahead):
    """A process that shares its rows with another has fewer groups than raw batches."""
    _, _, last = trained([group(place) for place in range(count)], plans_ahead=plans_ahead)
    assert last == [False] * (count - 1) + [True]


def test_repeated_row_group_is_passed_but_not_counted():
    done, losses, last = trained([group(3), group(1), group(1, repeated=True)], plans_ahead=True)
    assert (done, sorted(losses), last) == ([1, 3], [1.0, 3.0], [False, False, True])
