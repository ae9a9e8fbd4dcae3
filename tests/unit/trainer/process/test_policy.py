"""What trains is held in float32, on a base of any format; the start says where it is not."""

from __future__ import annotations

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.process.policy import load_policy
from tests.unit.trainer.learner.configs import run_config

FULL = {"train_type": "full"}


def config(model_path, *, dtype="auto", tuner=None, **top):
    return run_config(model={"model": str(model_path), "torch_dtype": dtype}, tuner=tuner or {}, **top)


def formats(policy):
    return {parameter.requires_grad: parameter.dtype for parameter in policy.parameters()}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_float32_on_a_base_of_bfloat16(model_path, dora):
    policy = load_policy(config(model_path, tuner={"use_dora": dora}))
    assert formats(policy) == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("tuner", [FULL, {"modules_to_save": ["merger"]}], ids=["in full", "a module trained whole"])
def test_weights_that_would_train_in_16_bits_are_refused_when_the_checkpoint_is_read(model_path, tuner):
    with pytest.raises(
        ConfigError, match=r"model.torch_dtype: 'auto'; .* would train in bfloat16: .* set it to float32"
    ):
        load_policy(config(model_path, tuner=tuner))


def test_weights_that_train_in_full_are_float32_where_that_is_asked_for(model_path):
    policy = load_policy(config(model_path, dtype="float32", tuner=FULL))
    assert formats(policy)[True] == torch.float32


def test_deepspeed_keeps_float32_copies_of_its_own(model_path):
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert formats(load_policy(config(model_path, tuner=FULL, deepspeed=zero)))[True] == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tuner", [FULL, {"modules_to_save": ["merger"]}])
def test_what_the_file_says_of_it_is_refused_before_a_checkpoint_is_read(dtype, tuner):
    with pytest.raises(ConfigError, match=r"model.torch_dtype: .*train in full need float32"):
        config("nowhere", dtype=dtype, tuner=tuner)
    config("nowhere", dtype="float32", tuner=tuner)
    config("nowhere", dtype=dtype, tuner=tuner, deepspeed={"bf16": {"enabled": True}})
