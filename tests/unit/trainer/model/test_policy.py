"""The tuner section decides what trains, in float32; no key-value cache survives loading."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.model.policy import (
    adapt,
    freeze,
    load_model,
    load_policy,
    load_processor,
    part_of,
    rope_model,
    split_learning_rates,
)
from tests.unit.trainer.learner.configs import run_config

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["all-linear"]}


@pytest.fixture
def model(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation="sdpa")


def training_parts(model):
    return {part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapted_parts(model):
    names = (name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad)
    return {part_of(name) for name in names}


def test_kv_cache_is_disabled_in_text_model_config(model):
    assert model.config.use_cache is False
    assert model.model.language_model.config.use_cache is False


def test_model_is_loaded_in_requested_dtype(model_path):
    assert load_model(model_path, dtype=None, attn_implementation=None).dtype == torch.bfloat16
    assert load_model(model_path, dtype=torch.float32, attn_implementation="eager").dtype == torch.float32


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ([], {"llm", "vit", "aligner"}),
        (["vit", "aligner"], {"llm"}),
        (["llm", "vit"], {"aligner"}),
        (["vit"], {"llm", "aligner"}),
    ],
)
def test_frozen_parts_do_not_train(model, frozen, expected):
    freeze(model, frozen)
    assert training_parts(model) == expected


def test_freezing_everything_is_refused(model):
    with pytest.raises(ConfigError, match="at least one part"):
        freeze(model, ["llm", "vit", "aligner"])


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_on_linear_layers_of_trained_parts(model, dora):
    adapted = adapt(model, ["vit", "aligner"], {**LORA, "use_dora": dora})
    assert adapted_parts(adapted) == {"llm"}
    layers = model.config.text_config.num_hidden_layers
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == layers * 7 * (3 if dora else 2)
    assert not any("lm_head" in name for name in trained)


def test_target_modules_are_restricted_to_trained_parts(model):
    adapted = adapt(model, ["llm", "vit"], {**LORA, "target_modules": ["all-linear"]})
    assert adapted_parts(adapted) == {"aligner"}


def test_target_module_without_linear_layer_is_refused(model):
    """Its layers would be left as they are without a word, as the experts of a mixture would by gate_proj."""
    with pytest.raises(ConfigError, match=r"tuner\.target_modules: \['gate', 'w1'\]; no linear layer has such a name"):
        adapt(model, ["vit", "aligner"], {**LORA, "target_modules": ["q_proj", "gate", "w1", "linear_fc1"]})


def test_output_layer_as_target_module_is_refused(model):
    with pytest.raises(ConfigError, match=r"tuner\.target_modules: \['lm_head'\]; the output layer gets no adapter"):
        adapt(model, [], {**LORA, "target_modules": ["lm_head", "q_proj"]})


def test_target_modules_may_be_suffixes(model):
    adapted = adapt(model, [], {**LORA, "target_modules": ["q_proj", "v_proj"]})
    owners = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in adapted.named_parameters() if p.requires_grad}
    assert owners == {"q_proj", "v_proj"}


def test_target_regex_overrides_target_modules_and_matches_whole_names(model):
    adapted = adapt(model, [], LORA, regex=r"model\.visual\.blocks\.\d+\.attn\.qkv")
    assert adapted_parts(adapted) == {"vit"}
    with pytest.raises(ConfigError, match=r"tuner\.target_regex"):
        adapt(model, [], LORA, regex="qkv")
    with pytest.raises(ConfigError, match="regular expression"):
        adapt(model, [], LORA, regex="(")


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: adapt(model, [], LORA)])
def test_parts_get_their_own_learning_rates(model, wrap):
    wrapped = wrap(model)
    trained = {parameter: name for name, parameter in wrapped.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(list(trained), lr=1.0)
    split_learning_rates(optimizer, wrapped, {"vit": 0.1, "aligner": 0.01})
    rates = {trained[parameter]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    expected = {"llm": 1.0, "vit": 0.1, "aligner": 0.01}
    assert rates == {name: expected[part_of(name.removeprefix("base_model.model."))] for name in trained.values()}


def test_target_modules_that_match_nothing_are_refused(model):
    with pytest.raises(ConfigError, match=r"tuner\.target_modules"):
        adapt(model, ["vit"], {**LORA, "target_modules": ["c_attn"]})


def test_position_ids_come_from_same_model_with_adapters(model):
    inner = model.model
    assert rope_model(model) is inner
    assert rope_model(adapt(model, [], LORA)) is inner


@pytest.mark.parametrize("load", [load_processor, lambda path: load_model(path, dtype=None, attn_implementation=None)])
def test_folder_without_model_is_refused(load, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.model"):
        load(tmp_path)


@pytest.mark.parametrize("table", ["embed_tokens", "language_model.embed_tokens", "lm_head"])
def test_modules_to_save_with_one_of_two_tied_embeddings_is_refused(model, table):
    """Servers have one table for both: they would answer by another head than the learner's."""
    with pytest.raises(ConfigError, match=r"^tuner\.modules_to_save: .*train_coord_rows"):
        adapt(model, ["vit"], {**LORA, "modules_to_save": [table]})


def test_tied_embeddings_share_trained_token_rows(model):
    adapted = adapt(model, ["vit"], LORA, token_rows=[5, 9])
    rows = [name for name, parameter in adapted.named_parameters() if "token" in name and parameter.requires_grad]
    assert len(rows) == 1
    assert adapted.get_output_embeddings().weight[5].requires_grad


FULL = {"train_type": "full"}


def config(model_path, *, dtype="auto", tuner=None, **top):
    return run_config(model={"model": str(model_path), "torch_dtype": dtype}, tuner=tuner or {}, **top)


def formats(policy):
    return {parameter.requires_grad: parameter.dtype for parameter in policy.parameters()}


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_float32_on_bfloat16_base(model_path, dora):
    policy = load_policy(config(model_path, tuner={"use_dora": dora}))
    assert formats(policy) == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("tuner", [FULL, {"modules_to_save": ["merger"]}], ids=["in full", "a module trained whole"])
def test_16_bit_checkpoint_is_refused_for_full_training(model_path, tuner):
    with pytest.raises(
        ConfigError, match=r"model.torch_dtype: 'auto'; .* would train in bfloat16: .* set it to float32"
    ):
        load_policy(config(model_path, tuner=tuner))


def test_fully_trained_weights_are_float32_when_configured(model_path):
    policy = load_policy(config(model_path, dtype="float32", tuner=FULL))
    assert formats(policy)[True] == torch.float32


def test_sequence_bias_of_generation_config_is_removed_for_training(model_path, tmp_path):
    folder = shutil.copytree(model_path, tmp_path / "biased")
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sequence_bias": [[[99], -1.5]]}))
    assert load_policy(config(folder, tuner={})).generation_config.sequence_bias is None


def test_deepspeed_allows_bfloat16_weights_for_full_training(model_path):
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    assert formats(load_policy(config(model_path, tuner=FULL, deepspeed=zero)))[True] == torch.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("tuner", [FULL, {"modules_to_save": ["merger"]}])
def test_16_bit_dtype_for_full_training_is_refused_on_parsing_config(dtype, tuner):
    with pytest.raises(ConfigError, match=r"model.torch_dtype: .*train in full need float32"):
        config("nowhere", dtype=dtype, tuner=tuner)
    config("nowhere", dtype="float32", tuner=tuner)
    config("nowhere", dtype=dtype, tuner=tuner, deepspeed={"bf16": {"enabled": True}})
