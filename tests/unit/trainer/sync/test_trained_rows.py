"""Rows that train: in both tables, merged exactly, the others as they were, by the learner and by a server."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from stage2_trainer.model.policy import adapt, output_table
from stage2_trainer.sync.fleet.delivery import Shipment
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import merged_weights
from stage2_trainer.sync.vllm.server_merge import ServerMerge

ROWS = [5, 60, 31, 32]
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj"], "use_dora": True}
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"


def untied(model):
    model = copy.deepcopy(model)
    model.config.tie_word_embeddings = model.config.text_config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.5)
    return model


def moved(model):
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.fixture(params=["tied", "untied"])
def base(request, tiny):
    return tiny if request.param == "tied" else untied(tiny)


@pytest.fixture
def policy(base):
    return moved(adapt(copy.deepcopy(base), ["vit", "aligner"], LORA, token_rows=ROWS))


def tables(base):
    return [EMBEDDING, HEAD] if base.lm_head.weight is not base.get_input_embeddings().weight else [EMBEDDING]


def test_only_trained_rows_of_each_table_change(base, policy):
    before, after = dict(base.named_parameters()), dict(merged_weights(policy))
    assert after.keys() == before.keys()
    for name in tables(base):
        changed = (after[name] != before[name]).any(1).nonzero().flatten().tolist()
        assert changed == sorted(ROWS)


def test_merged_model_logits_equal_policy(base, policy):
    merged = copy.deepcopy(base)
    merged.load_state_dict(dict(merged_weights(policy)), strict=False)
    ids = torch.tensor([[5, 9, 60, 31, 12]])
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=ids).logits, policy(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_output_gradients_reach_trained_rows(policy):
    table, bias = output_table(policy)
    table[ROWS].sum().backward()
    found = [p.grad for name, p in policy.named_parameters() if "trainable_tokens_delta" in name and p.grad is not None]
    assert bias is None
    assert len(found) == 1
    assert torch.equal(found[0], torch.ones_like(found[0]))


def test_rows_train_in_float32_on_16_bit_table(tiny):
    policy = adapt(tiny.to(torch.bfloat16), ["vit", "aligner"], LORA, token_rows=ROWS)
    trained = {p.dtype for p in policy.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    assert output_table(policy)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("rounding", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_server_merge_of_trained_rows_equals_learner(base, dtype, rounding, tmp_path):
    base = base.to(dtype)
    save_file({name: p.detach().clone() for name, p in base.named_parameters()}, tmp_path / "model.safetensors")
    policy = moved(adapt(copy.deepcopy(base), ["vit", "aligner"], LORA, token_rows=ROWS))
    source = merged_weights(policy, rounding=rounding)
    made = frozenset(entry.name for entry in source.entries if entry.change is not None)
    shipment = Shipment.for_servers(source, made, Digests())
    server, loaded = ServerMerge(str(tmp_path), torch.device("cpu")), {}
    server.update(
        shipment.header["merge"],
        lambda arrived: arrived([(name, tensor.detach()) for name, tensor in shipment.tensors()]),
        lambda tensors: loaded.update(dict(tensors)),
    )
    assert loaded.keys() == dict(source).keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in source)
    shipment.digest_what_servers_merge()
    expected = json.loads(shipment.digest_request())["merge"]
    server.update(expected, lambda arrived: None, lambda tensors: None)
    sent = sum(tensor.nbytes for name, tensor in shipment.source if "#rows" in name)
    assert sent == len(tables(base)) * len(ROWS) * base.config.text_config.hidden_size * 4
