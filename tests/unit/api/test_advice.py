"""Settings without effect are reported with the reason."""

from typing import Any

import pytest

from stage2_api.advice import idle_settings
from stage2_api.parsing import parse_run_config
from tests.unit.api.wrong_jobs import good_job, patched

MATCHING = "custom.extra.rollout_matching"


def at(path: str, value: object) -> dict[str, Any]:
    """A patch that sets one key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)  # type: ignore[call-overload]


BASE = patched(
    good_job()["spec"]["config"],
    at(f"{MATCHING}.post_rollout_pack_scope", "step"),
    at(f"{MATCHING}.recipe", "recommended"),
    at("tuner.lora_dropout", 0.0),
    at(f"{MATCHING}.vllm.server.servers", [{"base_url": "http://a:1", "group_port": 1}]),
)
ALONE: list[tuple[str, object]] = [
    ("model.attn_impl", "flash_attention_3"),
    ("training.packing_length", 512),
    ("training.eval_packing", True),
    ("training.add_version", True),
    ("training.logging_dir", "tb"),
    ("training.save_delay_steps", 100),
    ("training.save_last_epoch", True),
    ("training.load_best_model_at_end", True),
    ("training.metric_for_best_model", "eval_rollout_f1"),
    ("template.truncation_strategy", "right"),
    (f"{MATCHING}.recipe", "seeds"),
    (f"{MATCHING}.offload.enabled", True),
    (f"{MATCHING}.rollout_buffer.enabled", True),
    (f"{MATCHING}.post_rollout_pack_scope", "micro"),
    (f"{MATCHING}.unmatched_weight", 0.2),
    (f"{MATCHING}.num_beams", 3),
    (f"{MATCHING}.debug_dump_parse_failures", True),
    (f"{MATCHING}.debug_dump_max", 5),
    (f"{MATCHING}.monitor_dump", {"enabled": True, "max_events": 3}),
    (f"{MATCHING}.desc_monitor", {"enabled": True, "mode": "both"}),
]
ADAMS: list[dict[str, Any]] = [
    {"optim": "sgd", "adam_beta1": 0.8},
    {"optim": "adafactor", "adam_beta2": 0.9},
    {"optim": "lion_8bit", "adam_epsilon": 1e-6},
]
TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("repeat_terminate.enabled", {"repeat_terminate": {"enabled": True}, "vllm": {"server": {"protocol": "swift"}}}),
    ("repeat_terminate.max_object_keys", {"repeat_terminate": {"enabled": True, "max_object_keys": 100}}),
    ("runaway.enabled", {"runaway": {"enabled": False, "steps": 5}}),
    ("vllm.sync.mode", {"vllm": {"enable_lora": True, "sync": {"mode": "auto"}}}),
]


FULL = {"train_type": "full", "use_dora": False}
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("training.warmup_steps", {"training": {"lr_scheduler_type": "constant", "warmup_steps": 3}}),
    ("training.warmup_ratio", {"training": {"lr_scheduler_type": "constant", "warmup_ratio": 0.1}}),
    (
        "training.lr_scheduler_kwargs",
        {"training": {"lr_scheduler_type": "constant_with_warmup", "lr_scheduler_kwargs": {"min_lr": 0}}},
    ),
    ("training.save_steps", {"training": {"save_strategy": "epoch", "save_steps": 3}}),
    ("training.eval_steps", {"training": {"eval_strategy": "no", "eval_steps": 3}}),
    ("training.greater_is_better", {"training": {"eval_strategy": "no", "greater_is_better": True}}),
    ("training.vit_lr", {"tuner": {**FULL, "freeze_vit": True}, "training": {"vit_lr": 1e-5}}),
    (
        "training.aligner_lr",
        {"tuner": {**FULL, "freeze_aligner": True}, "training": {"aligner_lr": 1e-5}},
    ),
]


@pytest.mark.parametrize(("path", "patch"), WITHOUT_EFFECT)
def test_setting_without_effect_is_reported(path: str, patch: dict[str, Any]) -> None:
    (idle,) = idle_settings(parse_run_config(patched(BASE, patch)))
    assert idle.path == path


@pytest.mark.parametrize("training", ADAMS)
def test_adam_parameter_is_reported_for_optimizer_without_it(training: dict[str, Any]) -> None:
    (idle,) = idle_settings(parse_run_config(patched(BASE, {"training": training})))
    assert idle.path == f"training.{list(training)[1]}"


def test_default_lora_dropout_with_dora_is_reported_with_cost() -> None:
    patch = patched(BASE, at("tuner", {"use_dora": True, "lora_dropout": None}))
    (costly,) = idle_settings(parse_run_config(patch))
    assert (costly.path, costly.value) == ("tuner.lora_dropout", 0.05)
    assert "2.0 times" in costly.rule


@pytest.mark.parametrize(
    ("path", "patch"),
    [
        *((path, at(path, value)) for path, value in ALONE),
        *((f"{MATCHING}.{key}", at(MATCHING, patch)) for key, patch in TOGETHER),
    ],
)
def test_idle_setting_is_reported(path: str, patch: dict[str, Any]) -> None:
    (idle,) = idle_settings(parse_run_config(patched(BASE, patch)))
    assert idle.path == path
    assert idle.value is not None


def test_checkpoints_without_deepspeed_state_are_reported_where_a_restart_needs_it() -> None:
    zero = {"deepspeed": {"zero_optimization": {"stage": 2}}, "training": {"save_only_model": True}}
    (harmful,) = idle_settings(parse_run_config(patched(BASE, zero)))
    assert (harmful.path, harmful.value) == ("training.save_only_model", True)
    assert "a restart is refused" in harmful.rule
    for other in (at("deepspeed", None), at("deepspeed.enabled", False), at("training.save_only_model", False)):
        assert idle_settings(parse_run_config(patched(BASE, zero, other))) == ()


def test_config_without_idle_settings_gets_no_advice() -> None:
    assert idle_settings(parse_run_config(BASE)) == ()


ALONE_ENOUGH = [{"supervised_share": 0.5}, {"unmatched_objects": "dropped"}, {"assignment": "dynamic"}]


def test_run_that_names_no_recipe_is_advised_to_name_one_whatever_else_it_sets() -> None:
    unnamed = patched(BASE, at(f"{MATCHING}.recipe", None))
    for key in ({}, *ALONE_ENOUGH):
        (advice,) = idle_settings(parse_run_config(patched(unnamed, at(MATCHING, key))))
        assert (advice.path, advice.value, advice.way_out) == (f"{MATCHING}.recipe", "seeds", "set it to recommended")
        assert "default" in advice.rule


@pytest.mark.parametrize("key", ALONE_ENOUGH)
def test_single_recipe_key_suppresses_advice_on_runaway_answers(key: dict[str, Any]) -> None:
    assert idle_settings(parse_run_config(patched(BASE, at(f"{MATCHING}.recipe", "seeds"), at(MATCHING, key)))) == ()


def test_recommended_recipe_is_overridden_by_explicit_keys() -> None:
    keys = {"recipe": "recommended", "unmatched_objects": "penalised"}
    own = {"custom": {"coord_soft_ce_w1": {"w1_weight": 0.5}, "extra": {"rollout_matching": keys}}}
    seeds, matching = (
        parse_run_config(patched(BASE, patch)).rollout_matching for patch in (at(f"{MATCHING}.recipe", "seeds"), own)
    )
    assert (matching.assignment, matching.matched_text_weight, matching.soft_ce_weight) == ("dynamic", 1.0, 0.1)
    assert (matching.unmatched_objects, matching.w1_weight) == ("penalised", 0.5)
    assert (seeds.assignment, seeds.matched_text_weight, seeds.soft_ce_weight) == ("hungarian", 0.0, 1.0)
