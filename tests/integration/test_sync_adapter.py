"""Adapter sync, against real vLLM and the stub: the server with the adapter is the learner, and without it the base."""

import copy
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model

from stage2_api.vllm import ServerAddress
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.sync.fleet.adapter import push_adapter
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, Prover
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.integration import policies

pytestmark = pytest.mark.in_turns(2, first=1)

NEW_TOKENS = 32


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def served(request, servers):
    return servers(request.param, enable_lora=True)


@pytest.fixture
def full(served, make_sync):
    return make_sync(served)


@pytest.fixture
def adapters(full):
    return partial(push_adapter, full.fleet)


@pytest.fixture
def backend(served, token):
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    with ServerBackend([served.base_url], token=token, sampling=sampling, timeout_s=30, infer_timeout_s=60) as one:
        yield one


def answer(backend, probe, adapter, version):
    request = RolloutRequest(messages=probe.messages, adapter=adapter)
    return backend.generate([request], seed_plan=SeedPlan(1, version, 0), version=version)[0].token_ids


def listed(client):
    return [model["id"] for model in client.get("/v1/models", "test")["data"]]


def test_server_answers_like_learner_with_adapter_and_like_base_without(adapters, client, backend, base, probe):
    policy = policies.trained(base, "lora", amount=0.1)
    report = adapters(policy, version=4)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE, adapter=report.adapter)
    with pytest.raises(ProofError):
        policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    policies.verify(base, probe, [client], tolerance=FLOAT32_TOLERANCE)
    assert answer(backend, probe, report.adapter, 4) == policies.greedy(policy, probe.inputs, NEW_TOKENS)
    assert answer(backend, probe, None, 4) == policies.greedy(base, probe.inputs, NEW_TOKENS)


def test_each_push_serves_new_adapter_name_and_unloads_previous_one(adapters, client, base, probe):
    policy = policies.trained(base, "lora")
    first = adapters(policy, version=1)
    policies.train_on(policy)
    second = adapters(policy, version=2)
    assert first.adapter != second.adapter
    assert not second.everything
    assert second.bytes == sum(p.numel() * 4 for n, p in policy.named_parameters() if "lora_" in n)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE, adapter=second.adapter)
    assert listed(client) == ["policy", second.adapter]


def test_request_for_unloaded_adapter_is_refused(adapters, backend, base, probe):
    policy = policies.trained(base, "lora")
    first = adapters(policy, version=1)
    adapters(policy, version=2)
    with pytest.raises(ServerError, match="answered 404"):
        answer(backend, probe, first.adapter, 2)


def test_rank_and_alpha_patterns_are_applied(adapters, client, base, probe):
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=policies.ADAPTED, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 16}
    )
    policy = get_peft_model(copy.deepcopy(base), config).eval()
    policies.train_on(policy)
    report = adapters(policy, version=1)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE, adapter=report.adapter)


def test_changed_base_is_restored_before_adapter_push(full, adapters, client, base, probe):
    full.push(policies.trained(base, "full"), version=1)
    policy = policies.trained(base, "lora")
    report = adapters(policy, version=2)
    assert report.everything
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE, adapter=report.adapter)


def test_full_push_unloads_adapters_of_server(full, adapters, client, base, probe):
    policy = policies.trained(base, "lora")
    adapters(policy, version=1)
    policies.train_on(policy)
    full.push(policy, version=2)
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    policies.train_on(policy)
    assert not full.push(policy, version=3).everything
    policies.verify(policy, probe, [client], tolerance=FLOAT32_TOLERANCE)
    assert listed(client) == ["policy"]


def test_refused_adapter_switches_run_to_full_pushes(full, adapters, client, base, probe, caplog):
    policy = policies.trained(base, "lora")
    sync = WeightSync(
        "auto", full=full.push, adapter=adapters, prover=Prover(probe, [client], every=1, tolerance=FLOAT32_TOLERANCE)
    )
    sync.ensure_synced(policy, 0)
    assert listed(client) == ["policy", sync.report.adapter]
    too_large = get_peft_model(
        copy.deepcopy(base), LoraConfig(r=200, lora_alpha=8, target_modules=policies.ADAPTED)
    ).eval()
    policies.train_on(too_large)
    for step in (1, 2):
        sync.ensure_synced(too_large, step)
    assert (sync.effective, sync.report.adapter) == ("full", None)
    assert [record.levelname for record in caplog.records if "rest of the run" in record.message] == ["WARNING"]
    assert listed(client) == ["policy"]


def test_server_without_lora_refuses_adapter_push(start_server, base, token):
    served = start_server("stub")
    full = FullPush(
        [ServerAddress(served.base_url, served.group_port)], token=token, timeout_s=30, device=torch.device("cpu")
    )
    with pytest.raises(ServerError, match="--enable-lora") as caught:
        push_adapter(full.fleet, policies.trained(base, "lora"), version=1)
    assert caught.value.server == served.base_url
    full.close()
