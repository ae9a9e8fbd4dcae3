"""What this version cannot do is refused at the start, with the key and the way out."""

from __future__ import annotations

import importlib
import json
import sys

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.model.deepspeed_compat import compile_nothing
from stage2_trainer.model.deepspeed_config import deepspeed_config, deepspeed_options
from tests.unit.trainer.learner.configs import SERVER, run_config

MATCHING = "custom.extra.rollout_matching"


def refused(config, *, world_size=1):
    with pytest.raises(ConfigError) as error:
        check_supported(config, world_size=world_size)
    return [problem.path for problem in error.value.problems]


def test_default_server_mode_is_supported():
    check_supported(run_config(), world_size=1)


def test_missing_tracker_package_is_reported_with_pip_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = run_config(training={"report_to": ["trackio"]})
    with pytest.raises(ConfigError, match=r"training.report_to: 'trackio'; needs .* pip install \"stage2\[trackio\]\""):
        check_supported(config, world_size=1)


def test_missing_deepspeed_is_reported_with_pip_extra(monkeypatch):
    """The learner failed at its import, and was started again."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"deepspeed: .*; needs .* pip install \"stage2\[deepspeed\]\""):
        check_supported(run_config(deepspeed=ZERO), world_size=1)
    check_supported(run_config(deepspeed={"enabled": False, "config": ZERO}), world_size=1)


SHARDED = {"vllm": {"mode": "server", "server": {**SERVER, "learners": "sharded"}}}
COLOCATE = {"mode": "colocate", "max_model_len": 1024}


@pytest.mark.parametrize(
    "matching",
    [
        {"rollout_backend": "hf"},
        {"vllm": COLOCATE},
        {"post_rollout_pack_scope": "window"},
        {"loss_normalizer": "window"},
        {"rollout_buffer": {"enabled": True, "m_steps": 2}},
        {"vllm": COLOCATE, "offload": {"enabled": True, "offload_model": True}},
    ],
)
def test_every_rollout_backend_and_packing_mode_is_supported(matching):
    check_supported(run_config(matching=matching, training={"gradient_accumulation_steps": 2}), world_size=1)


@pytest.mark.parametrize(
    ("matching", "path"),
    [
        ({"vllm": {**COLOCATE, "sleep_level": 1}}, "vllm.sleep_level"),
        ({"vllm": {**COLOCATE, "enable_lora": True, "sync": {"mode": "adapter"}}}, "vllm.sync.mode"),
    ],
)
def test_unimplemented_setting_is_refused_with_its_key(matching, path):
    config = run_config(matching=matching, tuner={"train_type": "lora"})
    assert refused(config) == [f"{MATCHING}.{path}"]


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "flash_attention_2"])
def test_built_in_attention_implementation_is_supported(attention):
    check_supported(run_config(model={"model": "model", "attn_impl": attention}), world_size=1)


def test_attention_implementation_with_missing_package_is_refused_with_advice():
    config = run_config(model={"model": "model", "attn_impl": "flash_attention_3"})
    with pytest.raises(ConfigError, match=r"model.attn_impl: 'flash_attention_3'; needs the package .* set it to auto"):
        check_supported(config, world_size=1)


def test_moe_model_is_refused_when_weights_must_be_pushed_to_vllm(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    mixture = {"model": {"model": str(tmp_path)}}
    assert refused(run_config(**mixture)) == ["model.model"]
    check_supported(run_config(matching={"rollout_backend": "hf"}, **mixture), world_size=1)
    servers = {"rollout_matching": {"vllm": {"mode": "server", "server": SERVER}}}
    supervised = {"train_jsonl": "x", "trainer_variant": "sft", "val_jsonl": "x", "extra": servers}
    sections = {**mixture, "custom": supervised}
    check_supported(run_config(training={"eval_strategy": "no"}, **sections), world_size=1)
    evaluated = run_config(training={"eval_strategy": "steps"}, **sections)
    with pytest.raises(ConfigError, match=r'model\.model: .* training\.eval_strategy: "no"'):
        check_supported(evaluated, world_size=1)
    for other in (json.dumps({"model_type": "qwen3_vl"}), "[]", "{"):
        (tmp_path / "config.json").write_text(other)
        check_supported(run_config(**mixture), world_size=1)


def test_cached_moe_model_is_refused_by_its_hub_name(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    mixture = run_config(model={"model": "someone/mixture"})
    check_supported(mixture, world_size=1)  # not fetched yet
    folder = tmp_path / "models--someone--mixture"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abcd")
    (folder / "snapshots" / "0123abcd").mkdir(parents=True)
    (folder / "snapshots" / "0123abcd" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe"}))
    with pytest.raises(ConfigError, match=r"model\.model: 'someone/mixture'; is a mixture of experts"):
        check_supported(mixture, world_size=1)


def test_several_learner_processes_with_servers_are_refused_with_reason():
    with pytest.raises(ConfigError, match="the learner is one process"):
        check_supported(run_config(), world_size=2)
    for matching in ({"rollout_backend": "hf"}, {"vllm": COLOCATE}, SHARDED):
        check_supported(run_config(matching=matching), world_size=2)


def test_world_size_must_be_multiple_of_tensor_parallel_size():
    pairs = run_config(matching={"vllm": {**COLOCATE, "tensor_parallel_size": 2}})
    check_supported(pairs, world_size=4)
    assert refused(pairs, world_size=3) == [f"{MATCHING}.vllm.tensor_parallel_size"]


def test_zero_3_with_servers_is_refused_unless_learners_are_sharded():
    zero = {"zero_optimization": {"stage": 3}}
    check_supported(run_config(matching={"rollout_backend": "hf"}, deepspeed=zero), world_size=2)
    check_supported(run_config(matching={"vllm": COLOCATE}, deepspeed=zero), world_size=2)
    check_supported(run_config(matching=SHARDED, deepspeed=zero), world_size=2)
    assert refused(run_config(deepspeed=zero)) == ["deepspeed.zero_optimization.stage"]


def test_train_coord_rows_with_zero_3_is_refused():
    rows, zero = {"train_type": "lora", "train_coord_rows": True}, {"zero_optimization": {"stage": 3}}
    assert refused(run_config(matching=SHARDED, deepspeed=zero, tuner=rows)) == ["tuner.train_coord_rows"]


ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("part", "training"),
    [
        ("optimizer", {"vit_lr": 1e-6}),
        ("optimizer", {"aligner_lr": 1e-6}),
        ("optimizer", {"optim": "sgd"}),
        ("scheduler", {"lr_scheduler_type": "cosine"}),
        ("scheduler", {"vit_lr": 1e-6}),
        ("scheduler", {"aligner_lr": 1e-6}),
    ],
)
def test_setting_that_deepspeed_would_replace_is_refused(part, training):
    built = ZERO | {part: {"type": "AdamW"}}
    assert refused(run_config(deepspeed=built, training=training)) == [f"deepspeed.{part}"]
    check_supported(run_config(deepspeed=built), world_size=1)
    check_supported(run_config(deepspeed=ZERO, training=training), world_size=1)


@pytest.mark.parametrize(
    ("built", "training", "path"),
    [
        ({"optimizer": {"type": "Adagrad"}}, {}, "deepspeed.optimizer.type"),
        ({}, {"optim": "adagrad"}, "training.optim"),
    ],
)
def test_adagrad_that_zero_builds_anew_is_refused(built, training, path):
    """Its rate stayed the first one, whatever the schedule, and at stage 3 no run could resume."""
    assert refused(run_config(deepspeed=ZERO | built, training=training)) == [path]
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    check_supported(run_config(deepspeed=offloaded | built, training=training), world_size=1)
    check_supported(run_config(training=training), world_size=1)


def test_scheduler_that_scales_rates_of_parts_is_supported():
    cosine = {"scheduler": {"type": "WarmupCosineLR"}}
    check_supported(run_config(deepspeed=ZERO | cosine, training={"vit_lr": 1e-6, "aligner_lr": 1e-6}), world_size=1)


@pytest.mark.parametrize("given", [{}, {"enabled": True}, {"bf16": {"enabled": True}}])
def test_deepspeed_config_without_zero_is_refused(given):
    """transformers runs without DeepSpeed if the configuration is empty; accelerate ends in an error without ZeRO."""
    assert refused(run_config(deepspeed=given)) == ["deepspeed"]


def test_deepspeed_takes_what_its_config_leaves_out_from_training_section():
    """Left out, DeepSpeed 0.19.8 clips gradients at 1.0."""
    built = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "gradient_clipping": 0.1}
    options = deepspeed_options(run_config(deepspeed=ZERO | built))
    assert options["optimizer"]["params"] == {"lr": 1e-5, "weight_decay": "auto", "betas": "auto", "eps": "auto"}
    assert options["gradient_clipping"] == 0.1
    assert deepspeed_options(run_config(deepspeed=ZERO))["gradient_clipping"] == "auto"
    assert deepspeed_options(run_config()) is None


def test_deepspeed_takes_rates_and_lengths_of_its_scheduler_from_training_section():
    """Left out, DeepSpeed 0.19.8 warms up for 1000 steps, to a rate of 0.001."""
    built = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}, "optimizer": {"type": "Lion"}}
    options = deepspeed_options(run_config(deepspeed=ZERO | built))
    assert options["scheduler"]["params"] == {"warmup_max_lr": "auto", "warmup_num_steps": 3}
    assert options["optimizer"]["params"] == {"lr": "auto", "weight_decay": "auto"}
    of_its_own = ZERO | {"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 0.1}}}
    assert deepspeed_options(run_config(deepspeed=of_its_own))["scheduler"] == of_its_own["scheduler"]


@pytest.mark.parametrize("block", [{}, {"bf16": {}}, {"bf16": {"immediate_grad_update": True}}])
def test_deepspeed_takes_precision_from_training_section(block):
    """Without `enabled` DeepSpeed 0.19.8 computes in float32, whatever training.bf16 says."""
    options = deepspeed_options(run_config(deepspeed=ZERO | block, training={"bf16": True}))
    assert options["bf16"] == {"enabled": "auto"} | block.get("bf16", {})
    assert options["fp16"] == {"enabled": "auto"}


def test_offload_with_deepspeed_is_refused_with_advice():
    offload = {"vllm": COLOCATE, "offload": {"enabled": True, "offload_optimizer": True}}
    with pytest.raises(ConfigError, match=r"offload.enabled to false, or rollout_backend to hf, or remove deepspeed"):
        run_config(matching=offload, deepspeed={"zero_optimization": {"stage": 2}})


def test_offload_without_effect_is_logged(caplog):
    check_supported(run_config(matching={"offload": {"enabled": True, "offload_model": True}}), world_size=1)
    assert "offload has no effect" in caplog.text


@pytest.mark.parametrize("wrap", [lambda zero: zero, lambda zero: {"enabled": True, "config": zero}])
def test_deepspeed_is_read_in_either_form(wrap):
    zero = {"zero_optimization": {"stage": 2}}
    assert deepspeed_config(run_config(deepspeed=wrap(zero))) == zero


def test_deepspeed_config_is_read_from_file(tmp_path):
    path = tmp_path / "zero2.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    assert deepspeed_config(run_config(deepspeed=str(path))) == {"zero_optimization": {"stage": 2}}


def test_disabled_deepspeed_config_is_none():
    assert deepspeed_config(run_config(deepspeed={"enabled": False, "config": {}})) is None


@pytest.mark.parametrize("content", [b"{", b"[2]", b"\xff", b"[" * 100_000, b""])
def test_deepspeed_file_without_json_object_is_refused(tmp_path, content):
    path = tmp_path / "zero.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"deepspeed: .*zero\.json.* must be a file with a JSON object"):
        deepspeed_config(run_config(deepspeed=str(path)))


@pytest.mark.parametrize(
    ("deepspeed", "path"),
    [
        ({"zero_optimization": {"stage": 3}}, "deepspeed.zero_optimization.stage"),
        ("zero2", "deepspeed"),
        (ZERO | {"datastates_ckpt": {"host_cache_size": 16}}, "deepspeed.datastates_ckpt"),
        (ZERO | {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "deepspeed.torch_autocast"),
        (ZERO | {"bf16": True}, "deepspeed.bf16"),
        (ZERO | {"optimizer": None}, "deepspeed.optimizer"),
        (ZERO | {"scheduler": {"type": "WarmupLR", "params": [3]}}, "deepspeed.scheduler.params"),
        ({"zero_optimization": 2}, "deepspeed.zero_optimization"),
        ({"zero_optimization": {"stage": "two"}}, "deepspeed.zero_optimization.stage"),
        ({"zero_optimization": {}}, "deepspeed.zero_optimization.stage"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}},
            "deepspeed.zero_optimization.offload_optimizer",
        ),
        ({"zero_optimization": {"stage": 3, "offload_param": "cpu"}}, "deepspeed.zero_optimization.offload_param"),
    ],
)
def test_unusable_deepspeed_config_is_refused(deepspeed, path):
    assert refused(run_config(deepspeed=deepspeed)) == [path]


def test_deepspeed_compiles_no_extension_when_processes_join(monkeypatch):
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self: pytest.fail("a compiler was asked"))
    compile_nothing()
    assert backend.build_shm_op() is None
