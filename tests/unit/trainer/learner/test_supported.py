"""What this version cannot do is refused at the start, with the key and the way out."""

from __future__ import annotations

import json

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.learner.supported import check_supported, deepspeed_config
from tests.unit.trainer.learner.configs import run_config

MATCHING = "custom.extra.rollout_matching"


def refused(config, *, world_size=1):
    with pytest.raises(ConfigError) as error:
        check_supported(config, world_size=world_size)
    return [problem.path for problem in error.value.problems]


def test_the_ordinary_server_mode_is_supported():
    check_supported(run_config(), world_size=1)


@pytest.mark.parametrize(
    ("matching", "path"),
    [
        ({"rollout_backend": "hf"}, "rollout_backend"),
        ({"vllm": {"mode": "colocate", "max_model_len": 1024}}, "vllm.mode"),
        ({"post_rollout_pack_scope": "window"}, "post_rollout_pack_scope"),
        ({"rollout_buffer": {"enabled": True, "m_steps": 2}}, "rollout_buffer.m_steps"),
        ({"monitor_dump": {"enabled": True}}, "monitor_dump.enabled"),
        ({"desc_monitor": {"enabled": True}}, "desc_monitor.enabled"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(matching, path):
    assert refused(run_config(matching=matching)) == [f"{MATCHING}.{path}"]


def test_a_loss_over_the_window_needs_the_window_in_one_micro_step():
    matching = {"loss_normalizer": "window"}
    check_supported(run_config(matching=matching), world_size=1)
    accumulated = run_config(matching=matching, training={"gradient_accumulation_steps": 2})
    assert refused(accumulated) == [f"{MATCHING}.loss_normalizer"]


@pytest.mark.parametrize("buffer", [{"enabled": True, "m_steps": 1}, {"enabled": False, "m_steps": 4}])
def test_a_buffer_that_reuses_nothing_is_no_buffer(buffer):
    check_supported(run_config(matching={"rollout_buffer": buffer}), world_size=1)


def test_several_learner_processes_are_refused_and_told_why(caplog):
    with pytest.raises(ConfigError, match="the learner is one process"):
        check_supported(run_config(), world_size=2)


def test_offload_without_effect_is_said(caplog):
    check_supported(run_config(matching={"offload": {"enabled": True, "offload_model": True}}), world_size=1)
    assert "offload has no effect" in caplog.text


@pytest.mark.parametrize("wrap", [lambda zero: zero, lambda zero: {"enabled": True, "config": zero}])
def test_deepspeed_is_read_in_either_form(wrap):
    zero = {"zero_optimization": {"stage": 2}}
    assert deepspeed_config(run_config(deepspeed=wrap(zero))) == zero


def test_deepspeed_is_read_from_a_file(tmp_path):
    path = tmp_path / "zero2.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert deepspeed_config(run_config(deepspeed=str(path))) == {"zero_optimization": {"stage": 2}}


def test_deepspeed_that_is_switched_off_is_none():
    assert deepspeed_config(run_config(deepspeed={"enabled": False, "config": {}})) is None


@pytest.mark.parametrize(
    ("deepspeed", "path"),
    [({"zero_optimization": {"stage": 3}}, "deepspeed.zero_optimization.stage"), ("zero2", "deepspeed")],
)
def test_deepspeed_that_cannot_work_is_refused(deepspeed, path):
    assert refused(run_config(deepspeed=deepspeed)) == [path]
