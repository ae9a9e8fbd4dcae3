"""Optimizer steps from records to new weights and their record, evaluations, and a request to stop."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pkgutil
import re
import shutil
from functools import partialmethod
from types import FunctionType
from typing import ClassVar

import pytest
import torch
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from stage2_api.errors import ConfigError
from stage2_trainer import grpo, learner
from stage2_trainer.learner.rows import PackedRowPlanner
from stage2_trainer.model.policy import adapt
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.wire.requests import request_seed
from tests.unit.trainer.learner.harness import before_step, build, only_first, perfect, read_log

ADAPTERS = {
    "r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "bias": "none", "target_modules": ["all-linear"],
    "modules_to_save": None,
}  # fmt: skip
METHODS = (FunctionType, classmethod, staticmethod, property)
ROUNDING = 2e-5  # float32, another order of additions


def private_overrides(package):
    """Yield each private method of a library's class that a class of the package overrides."""
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for cls in vars(importlib.import_module(info.name)).values():
            if isinstance(cls, type) and cls.__module__ == info.name:
                for base in [one for one in cls.__mro__[1:] if not one.__module__.startswith("stage2_")]:
                    for name in vars(cls).keys() & vars(base).keys():
                        if name.startswith("_") and not name.startswith("__") and isinstance(vars(cls)[name], METHODS):
                            yield f"{cls.__name__}.{name}"


def test_learner_overrides_no_private_method_of_library():
    """Decision 20: an upgrade of a library needs no look into its private parts. GRPO's trainer overrides some."""
    assert list(private_overrides(learner)) == []
    assert "CheckedTrainer._save_checkpoint" in private_overrides(grpo)


def test_step_changes_weights_and_logs_one_line(make, model):
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


def test_segments_that_do_not_fit_row_wait_for_later_step(make):
    rows = PackedRowPlanner(200, capacity=8, min_fill=0.1)
    first, second = [one for one in make(rows=rows, max_steps=2).train() if one["event"] == "step"]
    assert first["packing/post_rollout_buffer"] == 3 - first["packing/post_rollout_segments"] > 0
    assert second["packing/post_rollout_buffer"] > first["packing/post_rollout_buffer"]


def test_weights_are_pushed_once_for_each_optimizer_step(make):
    harness = make(max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    harness.learner.train()
    assert harness.sync.versions == [0, 1, 2]
    assert [(plan.global_step, plan.sizes) for plan in harness.backend.plans] == [
        (step, (1, 1, 1)) for step in range(3)
    ]
    assert harness.backend.seeds == [request_seed(17, step, micro, 0) for step in range(3) for micro in range(3)]


def test_accumulated_micro_steps_give_the_mean_loss(make):
    make(learning_rate=0.0).learner.train()
    parted = make(learning_rate=0.0, per_device_train_batch_size=1, gradient_accumulation_steps=3)
    whole, parts = [one for one in parted.train() if one["event"] == "step"]
    assert parts["rollout/gt_objects"] == whole["rollout/gt_objects"]
    # the same number of supervised tokens in each record: the mean of means is the mean
    assert parts["loss"] == pytest.approx(whole["loss"], rel=ROUNDING)


def test_perfect_rollouts_have_no_appended_objects_or_tail_loss(make):
    (step,) = [one for one in make(answer=perfect).train() if one["event"] == "step"]
    assert step["rollout/f1"] == 1.0
    assert step["rollout/fn_appended"] == 0
    assert step["loss/coord_tail"] is None
    assert step["loss/coord_prefix"] > 0


def test_evaluation_pushes_weights_first_and_logs_metrics(make):
    harness = make(answer=only_first)
    metrics = harness.learner.evaluate()
    assert harness.sync.versions == [0]
    assert metrics["eval_rollout_recall"] == 0.5
    assert metrics["eval_rollout_precision"] == 1.0
    (evaluation,) = harness.lines("evaluation")
    assert evaluation["eval_rollout_f1"] == pytest.approx(2 / 3)


def test_expected_answer_length_is_that_of_ground_truth(make):
    harness = make()
    harness.learner.train()
    harness.learner.evaluate()
    records = harness.backend.records
    assert harness.backend.expected == [len(perfect(one)) for one in records] * 2


def test_held_out_prompt_tokens_that_differ_on_server_stop_evaluation(make):
    harness = make()
    answer = harness.backend._rollout
    harness.backend._rollout = lambda *asked: dataclasses.replace(answer(*asked), prompt_token_ids=[7])
    with pytest.raises(ConfigError, match="prompt tokenization mismatch"):
        harness.learner.evaluate()


def test_step_after_evaluation_needs_no_further_push(make):
    harness = make(max_steps=2, eval_strategy="steps", eval_steps=1)
    harness.learner.train()
    assert harness.sync.versions == [0, 1, 2]


def test_interrupted_run_stops_before_requesting_rollouts(make):
    harness = make(max_steps=3)
    harness.interrupt.request()
    with pytest.raises(Interrupted):
        harness.learner.train()
    assert harness.backend.plans == []


def test_report_has_mean_loss_since_last_report_and_other_metrics_of_last_step(make):
    harness = make(max_steps=5, logging_steps=2, logging_first_step=True)
    harness.train()
    steps, reports = harness.lines("step"), [one for one in harness.learner.state.log_history if "loss" in one]
    assert [one["step"] for one in reports] == [1, 2, 4]
    losses = [one["loss"] for one in steps]
    assert [one["loss"] for one in reports] == pytest.approx([losses[0], losses[1], (losses[2] + losses[3]) / 2])
    assert [one["grad_norm"] for one in reports] == [steps[step]["grad_norm"] for step in (0, 1, 3)]
    assert harness.learner.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 5)


class Recorded(TrainerCallback):
    """A tracker that remembers what it is told."""

    told: ClassVar[list[tuple]] = []

    def note(self, args, state, control, *, event, model=None, logs=None, **kwargs):
        self.told.append((event, state.global_step, state.is_world_process_zero, set(logs or {})))

    on_train_begin = partialmethod(note, event="begin")
    on_log = partialmethod(note, event="log")
    on_save = partialmethod(note, event="save")
    on_train_end = partialmethod(note, event="end")


def test_trackers_receive_reports_evaluations_checkpoints_start_and_end(make, monkeypatch):
    monkeypatch.setattr(Recorded, "told", [])
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Recorded)
    make(
        max_steps=2, logging_steps=2, eval_strategy="steps", eval_steps=1, eval_on_start=True,
        save_strategy="steps", save_steps=2, report_to=["tensorboard"],
    ).train()  # fmt: skip
    assert [one[:3] for one in Recorded.told] == [
        ("begin", 0, True), ("log", 0, True), ("log", 1, True),
        ("log", 2, True), ("log", 2, True), ("save", 2, True), ("log", 2, True), ("end", 2, True),
    ]  # fmt: skip
    first, _, report, evaluation, last = (logs for event, *_, logs in Recorded.told if event == "log")
    assert first == evaluation > {"eval_rollout_f1", "epoch"}
    assert report > {"loss", "grad_norm", "learning_rate", "epoch"}
    assert last > {"train_loss", "train_runtime", "epoch"}


def test_eval_on_start_runs_before_first_step_but_not_on_resume(make, tmp_path):
    options = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    make(max_steps=1, **options, save_steps=1).train()
    make(max_steps=2, **options, save_steps=9).learner.train(tmp_path / "checkpoint-1")
    assert [one["step"] for one in read_log(tmp_path, "evaluation")] == [0, 1, 2]


def test_unknown_best_model_metric_is_refused_with_known_metrics(make):
    harness = make(
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, metric_for_best_model="rollout_f2"
    )
    with pytest.raises(ConfigError, match=r"metric_for_best_model: 'rollout_f2'; .*eval_rollout_f1, .*name one of"):
        harness.train()


def test_missing_best_checkpoint_is_forgotten_with_warning(make, tmp_path, caplog):
    options = {
        "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
        "metric_for_best_model": "rollout_f1",
    }  # fmt: skip
    make(answer=only_first, max_steps=2, **options).train()
    shutil.rmtree(tmp_path / "checkpoint-1")
    learner = make(answer=only_first, max_steps=3, **options).learner
    learner.train(tmp_path / "checkpoint-2")
    assert f"the best checkpoint so far, {tmp_path / 'checkpoint-1'}, no longer exists" in caplog.text
    assert (learner.state.best_model_checkpoint, learner.state.best_metric) == (None, pytest.approx(2 / 3))


def test_activity_names_current_step(make, records, tmp_path):
    harness, said = make(max_steps=2, save_strategy="steps", save_steps=1), []
    for step in (0, 1):
        before_step(harness.learner, step, lambda: said.append(ACTIVITY.line()))
    harness.train()
    assert [one.partition(" (")[0] for one in said] == ["step 1 of 2", "step 2 of 2"]


def test_samples_waiting_for_row_at_end_of_run_are_reported(make, caplog):
    make(rows=PackedRowPlanner(200, capacity=8, min_fill=0.1)).train()
    assert re.search(r"[12] samples still waited for a packed row when the run ended", caplog.text)


def test_resumed_run_reaches_weights_of_uninterrupted_run(tmp_path, model, encoder, records):
    """With dropout, weight decay, warm-up and a cosine, within an epoch."""

    def trained(folder, checkpoint=None, **options):
        torch.manual_seed(3)
        policy = adapt(copy.deepcopy(model), ["vit", "aligner"], ADAPTERS)
        run = build(
            tmp_path / folder, policy, encoder, records, answer=only_first, per_device_train_batch_size=1,
            weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=2, seed=7, **{"max_steps": 5, **options},
        )  # fmt: skip
        run.learner.train(checkpoint)
        return {name: one.detach() for name, one in policy.named_parameters() if one.requires_grad}

    whole = trained("whole", save_strategy="steps", save_steps=2)
    resumed = trained("resumed", tmp_path / "whole" / "checkpoint-2")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
