"""DeepSpeed's state in a checkpoint is read by a run with the same kind of DeepSpeed, and refused by any other."""

from __future__ import annotations

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.model.deepspeed_state import check_deepspeed_state
from tests.unit.trainer.learner.configs import run_config

ZERO = {"zero_optimization": {"stage": 2}}
ADAM, WARMUP = {"optimizer": {"type": "AdamW"}}, {"scheduler": {"type": "WarmupLR"}}


@pytest.fixture
def checkpoint(tmp_path):
    """A function that returns a checkpoint whose state DeepSpeed wrote with these options."""

    def make(**options):
        folder = tmp_path / "checkpoint-1"
        (folder / "global_step1").mkdir(parents=True)
        settled = ZERO | {"bf16": {"enabled": False}, "fp16": {"enabled": False}} | options
        torch.save({"ds_config": settled}, folder / "global_step1" / "mp_rank_00_model_states.pt")
        return folder

    return make


def check(folder, deepspeed, **training):
    check_deepspeed_state(folder, run_config(deepspeed=deepspeed, training=training), path="training.output_dir")


@pytest.mark.parametrize(
    ("written", "now", "training", "key"),
    [
        (WARMUP, ZERO, {}, "deepspeed.scheduler.type"),
        ({}, ZERO | WARMUP, {}, "deepspeed.scheduler.type"),
        (ADAM, ZERO, {}, "deepspeed.optimizer.type"),
        ({}, ZERO | ADAM, {}, "deepspeed.optimizer.type"),
        ({}, {"zero_optimization": {"stage": 3}}, {}, "deepspeed.zero_optimization.stage"),
        ({"zero_optimization": {"stage": 3}}, ZERO, {}, "deepspeed.zero_optimization.stage"),
        ({}, ZERO, {"bf16": True}, "training.bf16"),
        ({"bf16": {"enabled": True}}, ZERO, {}, "training.bf16"),
        ({"fp16": {"enabled": True}}, ZERO, {}, "training.fp16"),
    ],
)
def test_state_of_another_deepspeed_is_refused_with_its_key(checkpoint, written, now, training, key):
    with pytest.raises(ConfigError) as refused:
        check(checkpoint(**written), now, **training)
    (problem,) = refused.value.problems
    assert problem.path == key
    assert problem.way_out == f"set {key} back, or start over with --overwrite"


@pytest.mark.parametrize(
    ("written", "now", "training"),
    [
        (ADAM | WARMUP, ZERO | ADAM | WARMUP, {}),
        (ADAM, ZERO | {"optimizer": {"type": "adamw"}}, {}),
        ({}, {"zero_optimization": {"stage": 1}}, {}),
        ({}, ZERO | {"bf16": {"enabled": False}, "gradient_clipping": "auto"}, {}),
        ({"bf16": {"enabled": True}}, ZERO | {"bf16": {}}, {"bf16": True}),
    ],
)
def test_state_of_the_same_deepspeed_is_accepted(checkpoint, written, now, training):
    check(checkpoint(**written), now, **training)


def test_refusal_writes_values_as_yaml_does(checkpoint):
    with pytest.raises(ConfigError, match=r"bf16: true; DeepSpeed wrote .* with false, and") as refused:
        check(checkpoint(), ZERO | WARMUP, bf16=True)
    assert "deepspeed.scheduler.type: 'WarmupLR'; DeepSpeed wrote" in str(refused.value)
    assert "with null, and" in str(refused.value)


def test_checkpoint_that_a_person_named_is_refused_with_its_key(checkpoint, tmp_path):
    """Starting over with --overwrite leads to the named checkpoint again."""
    named = "training.resume_from_checkpoint"
    with pytest.raises(ConfigError) as other:
        check_deepspeed_state(checkpoint(), run_config(deepspeed={"zero_optimization": {"stage": 3}}), path=named)
    with pytest.raises(ConfigError) as none:
        check_deepspeed_state(tmp_path, run_config(deepspeed=ZERO), path=named)
    for refused in (other, none):
        assert refused.value.problems[0].way_out.endswith(f", or leave out {named}")


def test_checkpoint_of_a_run_without_deepspeed_is_accepted_without_it(tmp_path):
    check(tmp_path, None)
