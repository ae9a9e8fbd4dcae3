"""What need not be sent again: nothing that can have changed, and no part of a fused layer."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from stage2_trainer.sync.fleet.server import ServerSession
from stage2_trainer.sync.tensors.merge import HeldVersions, fused_layer, merged_weights

LAYER = "model.language_model.layers.0."


def adapted(model, *targets):
    return get_peft_model(model, LoraConfig(r=2, target_modules=list(targets)))


def held(model):
    return HeldVersions.from_source(merged_weights(model))


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
def test_a_tensor_belongs_to_the_layer_that_vllm_loads_it_into(name, layer):
    assert fused_layer(name) == layer


def test_a_server_that_holds_nothing_is_sent_everything(tiny):
    source = merged_weights(adapted(tiny, "q_proj"))
    assert HeldVersions().stale_names(source) == source.names()


def test_what_trains_is_sent_in_whole_fused_layers(tiny):
    model = adapted(tiny, "k_proj", "down_proj", "up_proj")
    stale = held(model).stale_names(merged_weights(model))
    assert short(stale) == {
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    assert all("language_model.layers" in name for name in stale)


def test_a_bias_goes_with_its_weight(tiny):
    model = adapted(tiny, "linear_fc1")
    stale = held(model).stale_names(merged_weights(model))
    assert {"model.visual.merger.linear_fc1.weight", "model.visual.merger.linear_fc1.bias"} <= stale


def test_a_frozen_tensor_that_somebody_changed_is_sent(tiny):
    model = adapted(tiny, "q_proj")
    server = held(model)
    norm = model.get_base_model().model.language_model.norm
    name = "model.language_model.norm.weight"
    assert name not in server.stale_names(merged_weights(model))
    with torch.no_grad():
        norm.weight.add_(1.0)
    assert name in server.stale_names(merged_weights(model))


def test_a_frozen_tensor_whose_storage_was_replaced_is_sent(tiny):
    model = adapted(tiny, "q_proj")
    server = held(model)
    norm = model.get_base_model().model.language_model.norm
    norm.weight.data = norm.weight.data.clone()
    assert "model.language_model.norm.weight" in server.stale_names(merged_weights(model))


def test_another_model_is_sent_whole(tiny):
    model = adapted(tiny, "q_proj")
    server = held(model)
    del model
    other = type(tiny)(tiny.config)
    source = merged_weights(other.requires_grad_(False))
    assert server.stale_names(source) == source.names()


def test_nothing_is_trusted_after_a_loss(tiny):
    model = adapted(tiny, "q_proj")
    session = ServerSession(client=None, transfer=Leaves())
    session.held = held(model)
    session.lose()
    source = merged_weights(model)
    assert session.held.stale_names(source) == source.names()


class Leaves:
    """A transfer that only leaves."""

    def disconnect(self):
        pass
