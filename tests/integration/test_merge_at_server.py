"""Merges at the server: what it loads and answers is what the learner would have sent; faults are caught."""

import pytest
import torch

from stage2_trainer.sync.fleet.proof import server_logprobs
from stage2_trainer.wire.chat import CHAT_ROUTE, chat_body
from stage2_trainer.wire.requests import RolloutRequest, Sampling
from tests.integration import policies
from tests.integration.conftest import BOTH_DTYPES

pytestmark = BOTH_DTYPES

NEW_TOKENS = 24
TOKEN_BYTES = 4096  # at most: the first message of each link, on the first push


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request):
    return request.param


def greedy_answer(client, probe):
    """The ids that a server generates for the probe's prompt."""
    asked = RolloutRequest(list(probe.messages))
    body = chat_body(asked, Sampling(max_new_tokens=NEW_TOKENS), seed=0)
    (choice,) = client.post(CHAT_ROUTE, "rollout", body=body)["choices"]
    return choice["token_ids"]


def test_different_weights_give_different_answers(sync_by, client, base, probe):
    """By this it is known that equal answers are no accident of a model that always says the same."""
    sync, policy = sync_by(merge="server"), policies.adapter_of(base, "lora")
    policies.train_on(policy, 0.02)
    sync.push(policy, version=1)
    answer = greedy_answer(client, probe)
    policies.train_on(policy, 0.5)
    sync.push(policy, version=2)
    assert greedy_answer(client, probe) != answer


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("kind", policies.ADAPTERS)
def test_server_merge_equals_weights_merged_by_learner(kind, sync_by, client, base, probe, dtype):
    """The first update makes a server whole that was started with random weights, later ones what trains."""
    policy = policies.adapter_of(base, kind)
    merging = sync_by(merge="server")
    first = merging.push(policy, version=1)
    policies.train_on(policy, 0.02)
    later = merging.push(policy, version=2)
    merged, answer = server_logprobs(client, probe), greedy_answer(client, probe)
    if kind != "embedding":  # PEFT leaves a tied output layer as it was, a server has one matrix for both
        policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES[dtype])
        if dtype == "float32":
            assert answer == policies.greedy(policy, probe.inputs, NEW_TOKENS)
    merging.close()
    sending = sync_by(merge="learner")
    everything = sending.push(policy, version=3)
    assert torch.equal(server_logprobs(client, probe), merged)
    assert greedy_answer(client, probe) == answer
    assert (first.merge, later.merge, everything.merge) == ("server", "server", "learner")
    assert (first.everything, later.everything) == (True, False)
    trains = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    assert first.bytes == later.bytes == trains
    assert later.bytes < everything.bytes / 4
    for report in (first, later, everything):
        assert report.bytes <= report.wire_bytes < report.bytes + TOKEN_BYTES


def test_stochastic_rounding_is_equal_on_server_and_learner(sync_by, client, base, probe, dtype):
    policy = policies.adapter_of(base, "dora")
    policies.train_on(policy, 0.001)
    said_after = {}
    for place, rounding in [("server", "stochastic"), ("learner", "stochastic"), ("learner", "nearest")]:
        sync = sync_by(merge=place, rounding=rounding)
        sync.push(policy, version=5)
        said_after[place, rounding] = server_logprobs(client, probe)
        sync.close()
    assert torch.equal(said_after["server", "stochastic"], said_after["learner", "stochastic"])
    equal = torch.equal(said_after["learner", "stochastic"], said_after["learner", "nearest"])
    assert equal is (dtype == "float32")


def test_restarted_learner_sends_all_weights_and_server_merges_them(sync_by, client, base, probe, dtype):
    """What an earlier learner has left is neither read nor added to."""
    earlier = sync_by(merge="learner")
    earlier.push(policies.trained(base, "full"), version=1)
    earlier.close()
    policy = policies.adapter_of(base, "lora")
    policies.train_on(policy, 0.02)
    for version in (2, 3):
        learner = sync_by(merge="server")
        assert learner.push(policy, version=version).everything
        policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES[dtype])
        learner.close()
