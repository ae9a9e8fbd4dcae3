"""Settings that do nothing are named, with the reason."""

from typing import Any

import pytest

from stage2_api.advice import idle_settings
from stage2_api.parsing import parse_run_config
from tests.unit.api.wrong_jobs import good_job, merge_patch

CONFIG = good_job()["spec"]["config"]
ADDRESS = {"servers": [{"base_url": "http://a:1", "group_port": 1}]}


def matching(patch: dict[str, Any]) -> dict[str, Any]:
    own = {"post_rollout_pack_scope": "step", "vllm": {"server": ADDRESS}}
    return {"custom": {"extra": {"rollout_matching": merge_patch(own, patch)}}}


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"model": {"attn_impl": "flash_attention_3"}}, "model.attn_impl"),
        ({"training": {"packing_length": 512}}, "training.packing_length"),
        ({"training": {"eval_packing": True}}, "training.eval_packing"),
        ({"training": {"add_version": True}}, "training.add_version"),
        ({"training": {"logging_dir": "tb"}}, "training.logging_dir"),
        ({"training": {"save_delay_steps": 100}}, "training.save_delay_steps"),
        ({"training": {"save_last_epoch": True}}, "training.save_last_epoch"),
        ({"template": {"truncation_strategy": "right"}}, "template.truncation_strategy"),
        (
            matching({"repeat_terminate": {"enabled": True}, "vllm": {"server": {"protocol": "swift"}}}),
            "custom.extra.rollout_matching.repeat_terminate.enabled",
        ),
        (
            matching({"repeat_terminate": {"enabled": True, "max_object_keys": 100}}),
            "custom.extra.rollout_matching.repeat_terminate.max_object_keys",
        ),
        (matching({"offload": {"enabled": True}}), "custom.extra.rollout_matching.offload.enabled"),
        (matching({"rollout_buffer": {"enabled": True}}), "custom.extra.rollout_matching.rollout_buffer.enabled"),
        (matching({"post_rollout_pack_scope": "micro"}), "custom.extra.rollout_matching.post_rollout_pack_scope"),
        (matching({"unmatched_weight": 0.2}), "custom.extra.rollout_matching.unmatched_weight"),
        (matching({"recovery": {"weight": 3.0}}), "custom.extra.rollout_matching.recovery.rollouts"),
        (matching({"runaway": {"enabled": False, "steps": 5}}), "custom.extra.rollout_matching.runaway.enabled"),
        (matching({"num_beams": 3}), "custom.extra.rollout_matching.num_beams"),
        (
            matching({"vllm": {"enable_lora": True, "sync": {"mode": "auto"}}}),
            "custom.extra.rollout_matching.vllm.sync.mode",
        ),
    ],
)
def test_an_idle_setting_is_named(patch: dict[str, Any], path: str) -> None:
    config = parse_run_config(merge_patch(merge_patch(CONFIG, matching({})), patch))
    (idle,) = idle_settings(config)
    assert idle.path == path
    assert idle.value is not None


def test_a_configuration_without_idle_settings_gets_no_advice() -> None:
    assert idle_settings(parse_run_config(merge_patch(CONFIG, matching({})))) == ()
