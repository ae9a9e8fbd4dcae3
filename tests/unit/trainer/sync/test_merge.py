"""Merged weights: the values that PEFT's own merge gives, the checkpoint's names, and the live model untouched."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from stage2_trainer.sync.tensors.merge import merged_weights, touches_vision

LANGUAGE = r".*language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"


def adapted(model, **options):
    torch.manual_seed(4)
    options = {"r": 4, "lora_alpha": 8, "target_modules": LANGUAGE, **options}
    peft_model = get_peft_model(copy.deepcopy(model), LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return peft_model


def sent(model):
    return {name: tensor.clone() for name, tensor in merged_weights(model)}


def trained_names(source):
    return {entry.name for entry in source.entries if entry.trains}


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_names_shapes_and_dtypes_are_those_of_the_checkpoint(tiny, tmp_path):
    tiny.to(torch.bfloat16).save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    weights = sent(tiny)
    assert weights.keys() == checkpoint.keys()
    assert all(torch.equal(weights[name], checkpoint[name]) for name in weights)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "r": 9},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
        {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"k_proj": 3}},
        {"use_dora": True, "target_modules": r".*visual\..*(qkv|linear_fc1|linear_fc2|attn\.proj)"},
    ],
)
def test_adapters_are_merged_as_peft_merges_them(tiny, dtype, rounding, options):
    model = adapted(tiny.to(dtype), **options)
    weights = sent(model)
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert weights.keys() == merged.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], merged[name], rtol=rounding, atol=rounding / 2)


def test_merging_works_from_bfloat16_adapters_in_float32(tiny):
    model = adapted(tiny.to(torch.bfloat16)).to(torch.bfloat16)
    layer = model.get_base_model().model.language_model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(sent(model)[name], exact.to(torch.bfloat16))


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_thousand_passes_leave_the_model_bit_for_bit_as_it_was(tiny, use_dora):
    model = adapted(tiny.to(torch.bfloat16), use_dora=use_dora, target_modules=["q_proj"])
    before = snapshot(model)
    source = merged_weights(model)
    first = {name: tensor.clone() for name, tensor in source}
    for _ in range(1000):
        last = dict(source)
    after = snapshot(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_metadata_announces_what_iteration_yields(tiny):
    source = merged_weights(adapted(tiny.to(torch.bfloat16), use_dora=True))
    yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == yielded


def test_a_pass_sees_the_step_that_came_before_it(tiny):
    model = adapted(tiny)
    source = merged_weights(model)
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    before = dict(source)[name].clone()
    with torch.no_grad():
        model.get_base_model().model.language_model.layers[1].mlp.down_proj.lora_B["default"].weight.add_(1.0)
    assert not torch.equal(dict(source)[name], before)


def test_modules_trained_whole_are_sent_in_place_of_their_originals(tiny):
    model = adapted(tiny, modules_to_save=["merger"])
    weights = sent(model)
    own = tiny.model.visual.merger.linear_fc1.weight
    assert weights.keys() == sent(tiny).keys()
    assert not torch.equal(weights["model.visual.merger.linear_fc1.weight"], own)


def test_lora_on_an_embedding_is_merged(tiny):
    tiny.config.tie_word_embeddings = False
    tiny.lm_head.weight = torch.nn.Parameter(tiny.lm_head.weight.clone())
    model = adapted(tiny, target_modules=["embed_tokens"])
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    name = "model.language_model.embed_tokens.weight"
    assert torch.allclose(sent(model)[name], merged[name], atol=1e-6)
    assert "lm_head.weight" in sent(model)


def test_what_trains_is_known(tiny):
    model = adapted(tiny)
    names = trained_names(merged_weights(model))
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in names
    assert "model.language_model.embed_tokens.weight" not in names
    assert not touches_vision(names)
    assert touches_vision(trained_names(merged_weights(adapted(tiny, target_modules=r".*visual.*fc1"))))
    assert touches_vision(trained_names(merged_weights(tiny)))


@pytest.mark.parametrize(
    "options",
    [{"lora_bias": True}, {"use_dora": True, "target_modules": ["embed_tokens"]}],
)
def test_an_adapter_without_a_known_merge_is_refused_by_name(tiny, options):
    with pytest.raises(TypeError, match="no merge is known"):
        merged_weights(adapted(tiny, **options))
