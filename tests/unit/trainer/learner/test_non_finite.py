"""A number that is none ends a run before it reaches a weight or a checkpoint, and says where it came from."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stage2_api.errors import ConfigError
from stage2_trainer.learner.rows import PackedRowPlanner, StepRowPlanner
from stage2_trainer.model.checkpoints import NonFiniteError, newest_whole
from stage2_trainer.model.finite import MOST_OVERFLOWS, FiniteGuard, broken_weight
from tests.support.ports import free_port
from tests.unit.trainer.learner.harness import before_step, build, read_log, two_boxes
from tests.unit.trainer.learner.processes import join, run_members

BROKEN = "model.language_model.layers.0.mlp.up_proj.weight"
EACH_SAVED = {"save_strategy": "steps", "save_steps": 1}
SCOPES = {
    "unpacked": {},
    "micro": {"rows": PackedRowPlanner, "capacity": 8, "min_fill": 0.1},
    "step": {"rows": StepRowPlanner},
}


@pytest.fixture
def make(make):
    def run(scope="unpacked", **changes):
        planner = dict(SCOPES[scope])
        rows = planner.pop("rows")(400, **planner) if planner else None
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "max_steps": 3, **EACH_SAVED}
        return make(rows=rows, **{**options, **changes}).learner

    return run


def weight(model, name=BROKEN):
    return model.get_parameter(name)


def break_weight(model):
    with torch.no_grad():
        weight(model)[3, 5] = math.nan


def steps(folder):
    return [one["step"] for one in read_log(folder, "step")]


def assert_whole(folder, step):
    """Of the run nothing is lost but the step that ended it, and nothing that is not finite is on disk."""
    assert newest_whole(folder).name == f"checkpoint-{step}"
    for checkpoint in folder.glob("checkpoint-*"):
        for file in checkpoint.glob("*.safetensors"):
            assert all(bool(one.isfinite().all()) for one in load_file(file).values()), file


def test_model_with_non_finite_weight_is_refused_at_start(make, model, tmp_path):
    break_weight(model)
    with pytest.raises(ConfigError, match=rf"model\.model: .*{BROKEN} is not finite"):
        make().train()
    assert newest_whole(tmp_path) is None


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_non_finite_weight_stops_run_and_names_step_and_samples(make, model, tmp_path, scope, max_grad_norm):
    learner = make(scope, max_grad_norm=max_grad_norm)
    before_step(learner, 1, lambda: break_weight(model))
    with pytest.raises(NonFiniteError, match=rf"step 2: .*samples .*record-.*; the weight {BROKEN} is not finite"):
        learner.train()
    assert steps(tmp_path) == [1]
    assert_whole(tmp_path, 1)


@pytest.mark.parametrize("scope", SCOPES)
def test_non_finite_gradient_stops_run_before_weights_change(make, model, tmp_path, scope):
    """The weights are those of the checkpoint, and the pass that brought it is named."""
    learner, passes = make(scope), []

    def hook(gradient):
        passes.append(1)
        return gradient * math.inf

    before_step(learner, 1, lambda: weight(model).register_hook(hook))
    with pytest.raises(NonFiniteError, match=r"the gradient norm is (nan|inf) from (micro-step|row) 1 on"):
        learner.train()
    assert broken_weight(model) is None
    assert steps(tmp_path) == [1]
    assert_whole(tmp_path, 1)


def test_non_finite_gradient_error_names_micro_step_and_samples(make, model, records):
    learner, passes, seen = make(), [], []

    def second(gradient):
        passes.append(1)
        return gradient * math.nan if len(passes) == 2 else gradient

    note = learner.finite.note
    learner.finite.note = lambda kind, samples, *rest: (seen.append(list(samples)), note(kind, seen[-1], *rest))
    weight(model).register_hook(second)
    with pytest.raises(NonFiniteError) as caught:
        learner.train()
    assert "from micro-step 2 on (samples " + seen[1][0] + ")" in str(caught.value)
    assert len(seen) == len(records)


def test_non_finite_loss_stops_run_and_names_samples(make, tmp_path):
    learner = make()
    note = learner.finite.note
    learner.finite.note = lambda kind, samples, loss, *rest: note(kind, samples, loss * math.inf, *rest)
    with pytest.raises(NonFiniteError, match=r"step 1: the loss of micro-step 1 is inf \(samples record-\d\)"):
        learner.train()
    assert newest_whole(tmp_path) is None


def test_weight_overflow_in_optimizer_step_is_not_saved(make, model, tmp_path):
    """Finite gradients can still overflow a weight."""
    learner, ended = make(), []

    def after(*_):
        ended.append(1)
        if len(ended) == 2:
            break_weight(model)

    learner.engine.optimizer.optimizer.register_step_post_hook(after)
    with pytest.raises(NonFiniteError, match=f"step 2: the weight {BROKEN} is not finite, so no checkpoint is saved"):
        learner.train()
    assert_whole(tmp_path, 1)


def test_non_finite_weight_is_not_saved_at_exit(make, model, tmp_path):
    learner = make(max_steps=1, save_strategy="no")
    learner.train()
    break_weight(model)
    with pytest.raises(NonFiniteError):
        learner.save_progress()
    assert newest_whole(tmp_path) is None


@pytest.fixture
def scaled(model):
    """A guard under float16. There is no scaler on a CPU; what it would skip counts."""
    return FiniteGuard(model, torch.device("cpu"), scaled=True)


def test_fp16_overflows_stop_run_only_after_limit_of_consecutive_steps(scaled):
    for _ in range(MOST_OVERFLOWS - 1):
        assert not math.isfinite(scaled.check(math.inf, step=1))
    with pytest.raises(NonFiniteError, match="the gradient norm is inf"):
        scaled.check(math.inf, step=1)


def test_fp16_step_without_overflow_resets_overflow_count(scaled):
    for _ in range(2 * MOST_OVERFLOWS):
        scaled.check(math.inf, step=1)
        scaled.check(1.0, step=1)


def test_non_finite_weight_under_fp16_stops_run_at_once(scaled, model):
    break_weight(model)
    with pytest.raises(NonFiniteError, match=BROKEN):
        scaled.check(math.inf, step=1)


def test_checkpoint_with_non_finite_weight_is_refused_on_resume(make, model, tmp_path):
    make(max_steps=1).train()
    (file,) = (tmp_path / "checkpoint-1").glob("*.safetensors")
    tensors = load_file(file)
    tensors[BROKEN][0, 0] = math.nan
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"training\.resume_from_checkpoint: .*is not finite.*remove this checkpoint"):
        make(max_steps=2).train(tmp_path / "checkpoint-1")


def member(rank, port, folder, paths):
    """One of two learner processes, each on two records a step: of the second an image is lost, then a gradient."""
    model, encoder = join(rank, port)
    records = two_boxes([paths[0], paths[1], paths[2], paths[0] + ".gone"])
    options = {"per_device_train_batch_size": 2, "max_steps": 3, "ddp_backend": "gloo", **EACH_SAVED}
    harness = build(Path(folder, f"rank-{rank}"), model, encoder, records, **options)
    if rank == 1:
        before_step(harness.learner, 1, lambda: weight(model).register_hook(lambda gradient: gradient * math.nan))
    with pytest.raises(NonFiniteError) as caught:
        harness.learner.train()
    total = harness.learner.passes.bad.total
    Path(folder, f"{rank}.json").write_text(json.dumps([str(caught.value), total, harness.learner.state.global_step]))


def test_non_finite_gradient_stops_both_processes_with_same_message(tmp_path, image_paths):
    run_members(member, tmp_path, free_port(), str(tmp_path), image_paths)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for message, total, step in found:
        assert message.startswith("step 2: the gradient norm is nan from micro-step 1 on (samples record-")
        assert (total, step) == (1, 1)
    assert found[0][0] == found[1][0]
