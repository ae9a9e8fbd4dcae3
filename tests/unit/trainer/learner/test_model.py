"""What trains is what the tuner section says, and no key-value cache survives loading."""

from __future__ import annotations

import pytest
import torch
from stage2_api.errors import ConfigError

from stage2_trainer.learner.model import adapt, freeze, load_model, load_processor, part_of, rope_model

LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}


@pytest.fixture
def model(model_path):
    return load_model(model_path, dtype=torch.float32, attn_implementation="sdpa")


def training_parts(model):
    return {part_of(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapted_parts(model):
    names = (name.removeprefix("base_model.model.") for name, p in model.named_parameters() if p.requires_grad)
    return {part_of(name) for name in names}


def test_the_cache_is_off_where_the_text_model_reads_it(model):
    assert model.config.use_cache is False
    assert model.model.language_model.config.use_cache is False


def test_the_dtype_asked_for_is_the_one_loaded(model_path):
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
def test_adapters_sit_on_the_linear_layers_of_the_parts_that_train(model, dora):
    adapted = adapt(model, ["vit", "aligner"], {**LORA, "use_dora": dora})
    assert adapted_parts(adapted) == {"llm"}
    layers = model.config.text_config.num_hidden_layers
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == layers * 7 * (3 if dora else 2)
    assert not any("lm_head" in name for name in trained)


def test_named_target_modules_are_narrowed_to_the_parts_that_train(model):
    adapted = adapt(model, ["llm", "vit"], {**LORA, "target_modules": ["all-linear"]})
    assert adapted_parts(adapted) == {"aligner"}


def test_target_modules_may_be_suffixes(model):
    adapted = adapt(model, [], {**LORA, "target_modules": ["q_proj", "v_proj"]})
    owners = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in adapted.named_parameters() if p.requires_grad}
    assert owners == {"q_proj", "v_proj"}


def test_target_modules_that_match_nothing_are_refused(model):
    with pytest.raises(ConfigError, match=r"tuner\.target_modules"):
        adapt(model, ["vit"], {**LORA, "target_modules": ["c_attn"]})


def test_position_ids_come_from_the_same_model_under_adapters(model):
    inner = model.model
    assert rope_model(model) is inner
    assert rope_model(adapt(model, [], LORA)) is inner


@pytest.mark.parametrize("load", [load_processor, lambda path: load_model(path, dtype=None, attn_implementation=None)])
def test_a_directory_without_a_model_is_refused(load, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.model"):
        load(tmp_path)
