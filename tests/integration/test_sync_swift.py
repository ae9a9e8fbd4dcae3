"""The `swift rollout` protocol against the stub: identity, rollouts in order, a push that is proved, and failures."""

import os
import signal

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from stage2_api.errors import ConfigError
from stage2_api.vllm import ServerAddress
from stage2_trainer.data.encode import Encoder
from stage2_trainer.rollouts.build import check_swift_identity
from stage2_trainer.rollouts.swift import SwiftBackend
from stage2_trainer.sync.fleet.proof import FLOAT32_TOLERANCE, sample_probe, swift_logprobs
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.sync.swift.swift_sync import SwiftPush
from stage2_trainer.sync.tensors.merge import WeightAccess
from stage2_trainer.wire.client import ServerClient, wait_until_healthy
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.integration import policies
from tests.integration.conftest import patience

pytestmark = pytest.mark.in_turns(2, first=1)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def served(start_module_server):
    return [start_module_server("stub") for _ in range(2)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swift")
    shades = (40, 120, 200)
    return [policies.image_chat(folder / f"{k}.png", np.full((64, 96, 3), k, dtype=np.uint8)) for k in shades]


@pytest.fixture(scope="module")
def probe(model_path, chats):
    return sample_probe(Encoder(AutoProcessor.from_pretrained(model_path)), chats[0])


@pytest.fixture
def clients(served, token):
    return [ServerClient(server.base_url, token, timeout_s=30) for server in served]


def make_sync(served, token, **options):
    addresses = [ServerAddress(server.base_url, server.group_port) for server in served]
    options = {"timeout_s": 20, "access": WeightAccess(400_000), **options}
    return SwiftPush(addresses, token=token, device=torch.device("cpu"), **options)


def test_wait_for_swift_servers_uses_their_health_routes(served, token):
    wait_until_healthy([server.base_url for server in served], token, timeout_s=20, protocol="swift")


def test_every_swift_server_answers_like_learner_after_push(served, token, clients, base, probe):
    sync = make_sync(served, token)
    for kind in ("full", "dora"):
        policy = policies.trained(base, kind)
        sync.push(policy, version=1)
        policies.verify(policy, probe, clients, tolerance=FLOAT32_TOLERANCE, ask=swift_logprobs)
    with pytest.raises(ProofError):
        policies.verify(base, probe, clients, tolerance=FLOAT32_TOLERANCE, ask=swift_logprobs)
    sync.close()


def test_second_learner_can_push_to_same_swift_servers(served, token, clients, base, probe):
    for kind in ("lora", "full"):
        sync = make_sync(served, token)
        policy = policies.trained(base, kind)
        sync.push(policy, version=1)
        policies.verify(policy, probe, clients, tolerance=FLOAT32_TOLERANCE, ask=swift_logprobs)
        sync.close()


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_answers_come_in_request_order_and_follow_their_own_seeds(clients, chats, temperature):
    sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=temperature)
    requests = [RolloutRequest(chat) for chat in chats]
    together = SwiftBackend(clients, sampling=sampling).generate(requests, seed_plan=SeedPlan(1, 2, 0), version=2)
    alone = SwiftBackend(clients[:1], sampling=sampling).generate(requests, seed_plan=SeedPlan(1, 2, 0), version=2)
    assert [rollout.token_ids for rollout in together] == [rollout.token_ids for rollout in alone]
    assert [rollout.server for rollout in together] == [clients[0].base_url] * 2 + [clients[1].base_url]


def test_empty_request_list_calls_no_server(token):
    nowhere = ServerClient("http://127.0.0.1:9", token, timeout_s=60)
    assert SwiftBackend([nowhere], sampling=Sampling(1)).generate([], seed_plan=SeedPlan(1, 0, 0)) == []


def test_different_prompt_tokens_are_found_before_first_step(clients, probe):
    ids = probe.inputs["input_ids"][0].tolist()
    check_swift_identity(clients, probe.messages, ids)
    with pytest.raises(ConfigError, match="first at 3") as caught:
        check_swift_identity(clients, probe.messages, [*ids[:3], 5, *ids[4:]])
    assert len(caught.value.problems) == 2


def test_hanging_swift_server_fails_push_within_deadline(start_server, served, token, base):
    frozen = start_server("stub")
    sync = make_sync([served[0], frozen], token, timeout_s=patience(10.0))
    sync.push(base, version=1)
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    with pytest.raises(ServerError) as caught:
        sync.push(base, version=2)
    os.killpg(frozen.process.pid, signal.SIGKILL)
    assert caught.value.server == frozen.base_url
    assert caught.value.phase == "push"
