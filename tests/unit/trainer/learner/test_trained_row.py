"""A row's forward pass is its loss, in float32 whatever precision is around it."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import LossParts
from stage2_trainer.learner.trained_row import TrainedRow
from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.learner.harness import only_first

bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.fixture
def batch(make, records):
    learner = make(answer=only_first).learner
    learner.step.set_batches([records], global_step=0, uses=1)
    return learner.passes.lay_out(next(learner.step.rows(Stopwatch())))


@pytest.fixture
def row(model, matcher):
    """A function that builds the trained row of the model under a precision of its own."""
    return lambda autocast: TrainedRow(model, torch.as_tensor(matcher.vocab.ids), RolloutMatching(), autocast)


@torch.no_grad()
def test_outer_autocast_does_not_change_row_loss(row, batch):
    trained = row(bfloat16)
    alone = trained(batch["model"], batch["targets"])
    with bfloat16():
        wrapped = trained(batch["model"], batch["targets"])
    assert wrapped.total.dtype == torch.float32
    assert torch.equal(wrapped.total, alone.total)


@torch.no_grad()
def test_hidden_states_use_precision_of_row(row, batch):
    narrow, wide = (row(one)(batch["model"], batch["targets"]).total for one in (bfloat16, nullcontext))
    assert not torch.equal(narrow, wide)
    assert float(narrow) == pytest.approx(float(wide), rel=0.05)


@torch.no_grad()
def test_ordinary_and_coordinate_sums_add_up_to_loss(row, batch):
    trained, targets = row(nullcontext), batch["targets"]
    ordinary, coords = trained(batch["model"], targets, apart=True)
    whole: LossParts = trained(batch["model"], targets.divided_by(ce=1.0, coord=1.0))
    assert float(ordinary.total + coords.total) == pytest.approx(float(whole.total), rel=1e-5)


def test_trained_row_exposes_policy_parameters_under_same_names(row, model):
    trained = row(nullcontext)
    assert list(trained.named_parameters()) == list(model.named_parameters())
    assert trained.state_dict().keys() == model.state_dict().keys()
    assert trained.train().policy.training
    assert not trained.eval().policy.training


def test_compute_runs_function_within_forward_pass(row, model):
    trained, within = row(nullcontext), []
    trained.register_forward_hook(lambda *what: within.append("left"))
    assert trained.compute(lambda policy, word: (policy is model, word, len(within)), "word") == (True, "word", 0)
    assert within == ["left"]
