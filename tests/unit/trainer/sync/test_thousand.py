"""A thousand syncs of a moving policy: the base stays bit for bit, and so does what the server holds."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from stage2_trainer.sync.tensors.merge import HeldVersions, merged_weights

SYNCS = 1000


def policy_of(model, *, use_dora):
    torch.manual_seed(4)
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], use_dora=use_dora)
    )
    return adapted, [parameter for parameter in adapted.parameters() if parameter.requires_grad]


@torch.no_grad()
def step(parameters, scale):
    for parameter in parameters:
        parameter.add_(torch.randn_like(parameter) * scale)


@pytest.mark.parametrize("use_dora", [False, True])
def test_base_and_server_are_exact_after_a_thousand_changed_only_syncs(tiny, use_dora):
    policy, trains = policy_of(tiny.to(torch.bfloat16), use_dora=use_dora)
    at_start = {name: p.clone() for name, p in policy.named_parameters()}
    first = {name: tensor.clone() for name, tensor in merged_weights(policy)}
    server, held = {}, HeldVersions()
    sent = 0
    for _ in range(SYNCS):
        step(trains, 0.05)
        source = merged_weights(policy)
        changed = source.only(held.stale_names(source))
        for name, tensor in changed:
            server[name] = tensor.clone()
        held = HeldVersions.from_source(source)
        sent += len(changed.entries)
    assert sent == len(first) + (SYNCS - 1) * 6  # everything once, then q, k and v of two layers
    assert all(torch.equal(server[name], tensor) for name, tensor in merged_weights(policy))
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    assert all(torch.equal(p, at_start[name]) for name, p in policy.named_parameters() if name in frozen)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(at_start[name])
    assert all(torch.equal(tensor, first[name]) for name, tensor in merged_weights(policy))
