"""Merged weights: PEFT's values, the checkpoint's names, the live model untouched; and what need not be sent again."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from stage2_trainer.sync.fleet.server import ServerSession
from stage2_trainer.sync.tensors.digest import fused_layer
from stage2_trainer.sync.tensors.merge import Stamp, held_after, merged_weights, stale_names, touches_vision

SYNCS = 1000
LAYER = "model.language_model.layers.0."
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


def test_sent_weights_equal_saved_checkpoint(tiny, tmp_path):
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
def test_merged_weights_equal_peft_merge(tiny, dtype, rounding, options):
    model = adapted(tiny.to(dtype), **options)
    weights = sent(model)
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert weights.keys() == merged.keys()
    for name in weights:
        torch.testing.assert_close(weights[name], merged[name], rtol=rounding, atol=rounding / 2)


def test_bfloat16_adapters_are_merged_in_float32(tiny):
    model = adapted(tiny.to(torch.bfloat16)).to(torch.bfloat16)
    layer = model.get_base_model().model.language_model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.double() + 2.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(sent(model)[name], exact.to(torch.bfloat16))


def test_weight_metadata_equals_yielded_tensors(tiny):
    source = merged_weights(adapted(tiny.to(torch.bfloat16), use_dora=True))
    yielded = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == yielded


def test_each_iteration_yields_current_weights(tiny):
    model = adapted(tiny)
    source = merged_weights(model)
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    before = dict(source)[name].clone()
    with torch.no_grad():
        model.get_base_model().model.language_model.layers[1].mlp.down_proj.lora_B["default"].weight.add_(1.0)
    assert not torch.equal(dict(source)[name], before)


def test_modules_to_save_are_sent_instead_of_originals(tiny):
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


def test_trained_weight_names_are_known(tiny):
    model = adapted(tiny)
    names = trained_names(merged_weights(model))
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in names
    assert "model.language_model.embed_tokens.weight" not in names
    assert not touches_vision(names)
    assert touches_vision(trained_names(merged_weights(adapted(tiny, target_modules=r".*visual.*fc1"))))
    assert touches_vision(trained_names(merged_weights(tiny)))


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_dora": True, "target_modules": ["embed_tokens"]}])
def test_adapter_without_known_merge_is_refused(tiny, options):
    with pytest.raises(TypeError, match="no merge is known"):
        merged_weights(adapted(tiny, **options))


def test_two_active_adapters_are_refused(tiny):
    model = adapted(tiny)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(TypeError, match="no merge is known"):
        merged_weights(model)


def adapted_by(model, *targets):
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(targets)))


def held(model):
    return held_after(merged_weights(model))


def short(names):
    return {name.removeprefix(LAYER) for name in names if name.startswith(LAYER)}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.qkv_proj"),
        (f"{LAYER}self_attn.v_proj.bias", f"{LAYER}self_attn.qkv_proj"),
        (f"{LAYER}mlp.up_proj.weight", f"{LAYER}mlp.gate_up_proj"),
        (f"{LAYER}mlp.down_proj.weight", f"{LAYER}mlp.down_proj"),
        ("model.visual.merger.norm.bias", "model.visual.merger.norm"),
    ],
)
def test_tensor_belongs_to_fused_layer_of_vllm(name, layer):
    assert fused_layer(name) == layer


def test_server_that_holds_nothing_is_sent_all_weights(tiny):
    source = merged_weights(adapted_by(tiny, "q_proj"))
    assert stale_names({}, source) == source.names()


def test_trained_weights_are_sent_as_whole_fused_layers(tiny):
    model = adapted_by(tiny, "k_proj", "down_proj", "up_proj")
    stale = stale_names(held(model), merged_weights(model))
    assert short(stale) == {
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert all("language_model.layers" in name for name in stale)


def test_bias_is_sent_with_its_weight(tiny):
    model = adapted_by(tiny, "linear_fc1")
    stale = stale_names(held(model), merged_weights(model))
    assert {"model.visual.merger.linear_fc1.weight", "model.visual.merger.linear_fc1.bias"} <= stale


def test_modified_frozen_tensor_is_sent(tiny):
    model = adapted_by(tiny, "q_proj")
    server = held(model)
    norm = model.get_base_model().model.language_model.norm
    name = "model.language_model.norm.weight"
    assert name not in stale_names(server, merged_weights(model))
    with torch.no_grad():
        norm.weight.add_(1.0)
    assert name in stale_names(server, merged_weights(model))


def test_frozen_tensor_with_replaced_storage_is_sent(tiny):
    model = adapted_by(tiny, "q_proj")
    server = held(model)
    norm = model.get_base_model().model.language_model.norm
    norm.weight.data = norm.weight.data.clone()
    assert "model.language_model.norm.weight" in stale_names(server, merged_weights(model))


def test_parameter_stamp_does_not_match_other_parameter_with_same_storage(tiny):
    own = torch.nn.Parameter(torch.zeros(2))
    assert Stamp.from_parameter(own).still_describes(own)
    assert not Stamp.from_parameter(own).still_describes(torch.nn.Parameter(own.data))


def test_different_model_is_sent_completely(tiny):
    model = adapted_by(tiny, "q_proj")
    server = held(model)
    del model
    other = type(tiny)(tiny.config)
    source = merged_weights(other.requires_grad_(False))
    assert stale_names(server, source) == source.names()


def test_lost_server_is_sent_all_weights_again(tiny):
    model = adapted_by(tiny, "q_proj")
    session = ServerSession(client=None, transfer=Leaves())
    session.held, session.holds_base, session.proven_base = held(model), True, {}
    session.lose()
    source = merged_weights(model)
    assert (session.holds_base, session.proven_base) == (False, None)
    assert stale_names(session.held, source) == source.names()


class Leaves:
    """A transfer that only leaves."""

    def disconnect(self):
        pass


@torch.no_grad()
def step(parameters, scale):
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter) * scale)


@pytest.mark.parametrize("use_dora", [False, True])
def test_base_and_server_weights_are_exact_after_thousand_changed_only_pushes(tiny, use_dora):
    policy = adapted(tiny.to(torch.bfloat16), use_dora=use_dora, target_modules=["q_proj"])
    trains = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    at_start = {name: p.clone() for name, p in policy.named_parameters()}
    first = {name: tensor.clone() for name, tensor in merged_weights(policy)}
    server, held = {}, {}
    sent = 0
    for _ in range(SYNCS):
        step(trains, 0.05)
        source = merged_weights(policy)
        changed = source.only(stale_names(held, source))
        for name, tensor in changed:
            server[name] = tensor.clone()
        held = held_after(source)
        sent += len(changed.entries)
    assert sent == len(first) + (SYNCS - 1) * 6  # everything once, then q, k and v of two layers
    assert all(torch.equal(server[name], tensor) for name, tensor in merged_weights(policy))
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, at_start[name]) for name, p in policy.named_parameters() if name in frozen)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(at_start[name])
    assert all(torch.equal(tensor, first[name]) for name, tensor in merged_weights(policy))
