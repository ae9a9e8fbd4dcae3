"""One optimizer step from records to new weights, its record, and what runs inside a wrapper's forward pass."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from stage2_api.errors import ConfigError
from stage2_trainer.learner.rows import PackedRowPlanner
from stage2_trainer.learner.step import run_inside
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.wire.requests import request_seed
from tests.unit.trainer.learner.harness import only_first, perfect

ROUNDING = 2e-5  # float32, another order of additions


def test_a_step_changes_weights_and_writes_one_record(make, model):
    before = model.model.language_model.layers[0].mlp.up_proj.weight.clone()
    harness = make(answer=only_first)
    harness.train()
    assert not torch.equal(before, model.model.language_model.layers[0].mlp.up_proj.weight)
    (step,) = harness.lines("step")
    assert step["step"] == 1
    assert step["loss"] == pytest.approx(step["loss/ce"] + step["loss/coord"], rel=1e-5)
    assert step["rollout/gt_objects"] == 6
    assert step["rollout/matched_for_supervision"] == 3
    assert step["rollout/fn_appended"] == 3
    assert step["grad_norm"] > 0
    assert (harness.reporter.current.step, harness.reporter.current.loss) == (1, step["loss"])


def test_what_does_not_fit_a_row_is_trained_on_later(make):
    rows = PackedRowPlanner(200, capacity=8, min_fill=0.1)
    first, second = [one for one in make(rows=rows, max_steps=2).train() if one["event"] == "step"]
    assert first["packing/post_rollout_buffer"] == 3 - first["packing/post_rollout_segments"] > 0
    assert second["packing/post_rollout_buffer"] > first["packing/post_rollout_buffer"]


def test_weights_are_pushed_once_for_each_optimizer_step(make):
    harness = make(max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    harness.trainer.train()
    assert harness.sync.versions == [0, 1, 2]
    assert [(plan.global_step, plan.sizes) for plan in harness.backend.plans] == [
        (step, (1, 1, 1)) for step in range(3)
    ]
    assert harness.backend.seeds == [request_seed(17, step, micro, 0) for step in range(3) for micro in range(3)]


def test_accumulated_micro_steps_give_the_mean_loss(make):
    make(learning_rate=0.0).trainer.train()
    parted = make(learning_rate=0.0, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    whole, parts = [one for one in parted.train() if one["event"] == "step"]
    assert parts["rollout/gt_objects"] == whole["rollout/gt_objects"]
    # the same number of supervised tokens in each record: the mean of means is the mean
    assert parts["loss"] == pytest.approx(whole["loss"], rel=ROUNDING)


def test_perfect_rollouts_are_taught_to_end_and_nothing_else_but_coordinates(make):
    (step,) = [one for one in make(answer=perfect).train() if one["event"] == "step"]
    assert step["rollout/f1"] == 1.0
    assert step["rollout/fn_appended"] == 0
    assert step["loss/coord_tail"] is None
    assert step["loss/coord_prefix"] > 0


def test_an_evaluation_syncs_first_and_logs_its_metrics(make):
    harness = make(answer=only_first)
    metrics = harness.trainer.evaluate()
    assert harness.sync.versions == [0]
    assert metrics["eval_rollout_recall"] == 0.5
    assert metrics["eval_rollout_precision"] == 1.0
    (evaluation,) = harness.lines("evaluation")
    assert evaluation["eval_rollout_f1"] == pytest.approx(2 / 3)


def test_answers_are_expected_to_be_as_long_as_the_ground_truth_in_training_and_evaluation(make):
    harness = make()
    harness.trainer.train()
    harness.trainer.evaluate()
    records = harness.backend.records
    assert harness.backend.expected == [len(perfect(one)) for one in records] * 2


def test_a_held_out_prompt_that_the_server_saw_otherwise_stops_the_evaluation(make):
    harness = make()
    answer = harness.backend._rollout
    harness.backend._rollout = lambda *asked: dataclasses.replace(answer(*asked), prompt_token_ids=[7])
    with pytest.raises(ConfigError, match="prompt tokenization mismatch"):
        harness.trainer.evaluate()


def test_an_evaluation_after_a_step_saves_the_next_step_a_sync(make):
    harness = make(max_steps=2, eval_strategy="steps", eval_steps=1)
    harness.trainer.train()
    assert harness.sync.versions == [0, 1, 2]


def test_a_run_that_is_asked_to_stop_stops_before_its_next_rollouts(make):
    harness = make(max_steps=3)
    harness.interrupt.request()
    with pytest.raises(Interrupted):
        harness.trainer.train()
    assert harness.backend.plans == []


class Wrapper(nn.Module):
    """Like DistributedDataParallel: does something around the forward pass of what it holds."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.passes = 0

    def forward(self, *inputs):
        self.passes += 1
        return self.module(*inputs)


@pytest.fixture
def module():
    return nn.Linear(2, 1)


def test_the_computation_runs_within_the_wrapper(module):
    wrapper = Wrapper(module)
    found = run_inside(wrapper, module, lambda x: ("ours", module(x)), torch.ones(2))
    assert found[0] == "ours"
    assert torch.equal(found[1], module(torch.ones(2)))
    assert wrapper.passes == 1


def test_an_unwrapped_module_is_its_own_wrapper(module):
    assert run_inside(module, module, lambda x: x + 1, 1) == 2


def test_the_module_is_as_it_was_afterwards_also_after_an_error(module):
    def fail(x):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_inside(Wrapper(module), module, fail, 1)
    assert "forward" not in module.__dict__
    patched = module.forward = lambda x: "patched by somebody"
    run_inside(Wrapper(module), module, lambda x: x, 1)
    assert module.forward is patched
