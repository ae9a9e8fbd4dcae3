"""The training YAML reaches transformers and peft by its own names."""

from __future__ import annotations

import pytest
import torch

from stage2_trainer.model.policy import adapter_options, frozen_parts, weights_dtype
from stage2_trainer.model.training_arguments import training_arguments
from tests.unit.trainer.learner.configs import run_config


def arguments(tmp_path, **training):
    return training_arguments(run_config(training={"output_dir": str(tmp_path), **training}), world_size=1)


def test_shared_keys_are_passed_to_transformers(tmp_path):
    found = arguments(tmp_path, learning_rate=2.0e-4, max_steps=7, adam_beta2=0.98, seed=3, save_strategy="no")
    assert (found.learning_rate, found.max_steps, found.adam_beta2, found.seed) == (2.0e-4, 7, 0.98, 3)
    assert str(found.save_strategy.value) == "no"


def test_unused_columns_are_kept_and_trackers_are_off_by_default(tmp_path):
    found = arguments(tmp_path)
    assert found.remove_unused_columns is False
    assert found.report_to == []


def test_gradient_accumulation_follows_effective_batch_size(tmp_path):
    found = arguments(tmp_path, effective_batch_size=10, per_device_train_batch_size=4)
    assert found.gradient_accumulation_steps == 3


@pytest.mark.parametrize(
    ("given", "expected"), [({"warmup_ratio": 0.1}, 10), ({"warmup_steps": 3, "warmup_ratio": 0.1}, 3), ({}, 0)]
)
def test_warmup_steps_take_precedence_over_warmup_ratio(tmp_path, given, expected):
    assert arguments(tmp_path, **given).get_warmup_steps(100) == expected


def test_run_with_evaluation_evaluates_on_start(tmp_path):
    config = run_config(training={"output_dir": str(tmp_path), "eval_strategy": "steps", "eval_steps": 5})
    assert not arguments(tmp_path).eval_on_start
    assert training_arguments(config, world_size=1).eval_on_start


def test_tuner_and_template_are_read(tmp_path):
    config = run_config(
        model={"model": "m", "torch_dtype": "float32"},
        tuner={"train_type": "lora", "use_dora": True, "lora_rank": 4, "lora_alpha": 8, "freeze_aligner": False},
        template={"max_pixels": 4096},
    )
    options = adapter_options(config)
    assert (options["r"], options["lora_alpha"], options["use_dora"]) == (4, 8, True)
    assert frozen_parts(config) == ["vit"]
    assert weights_dtype(config) is torch.float32
    assert config.template.pixel_limits() == {"max_pixels": 4096}
