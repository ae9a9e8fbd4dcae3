"""Digests of what a learner sends whole: of layers that it has merged, and of a model that trains in full.

Servers are stubs: what receives, notes and answers in them is the code that a vLLM server runs (a real one:
test_server_contract.py).
"""

import copy

import pytest

from stage2_api.vllm import VllmSync
from stage2_trainer.sync.fleet import delivery
from stage2_trainer.sync.fleet.merge_location import MergeLocation
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.sync.tensors.digest import fused_layer
from stage2_trainer.sync.tensors.merge import merged_weights
from tests.integration import policies
from tests.integration.conftest import BOTH_DTYPES
from tests.integration.sent_faults import FAULTS, LAYER

pytestmark = BOTH_DTYPES


@pytest.fixture(params=["dora merged by the learner", "full training"])
def policy(request, base):
    if request.param == "full training":
        return copy.deepcopy(base)
    return policies.adapter_of(base, "dora")


@pytest.fixture
def sync(served, make_sync):
    return make_sync(served, how=VllmSync(merge="learner"))


@pytest.fixture
def expected(monkeypatch):
    """The digests that servers were asked to have, layer by layer, sync after sync."""
    found = []
    honest = delivery.digest_request

    def digest_request(layers):
        found.append(dict(layers))
        return honest(layers)

    monkeypatch.setattr(delivery, "digest_request", digest_request)
    return found


def test_every_push_compares_digests_of_all_sent_layers(sync, policy, expected):
    sync.push(policy, version=1)
    policies.train_on(policy, 0.02)
    sync.push(policy, version=2)
    layers = {fused_layer(name) for name in merged_weights(policy).names()}
    assert set(expected[0]) == layers
    trained = {name: digest for name, digest in expected[1].items() if digest != expected[0][name]}
    assert any(LAYER in name for name in trained)
    assert len(expected) == 2


@pytest.mark.parametrize("part", ["vision", "one-projection"])
def test_partial_push_compares_only_sent_layers(part, sync, base, expected):
    policy = policies.partly_trained(base, part)
    sync.push(policy, version=1)
    policies.train_on(policy, 0.02)
    sync.push(policy, version=2)
    assert 0 < len(expected[1]) < len(expected[0])
    assert all(("visual" in layer) is (part == "vision") for layer in expected[1])


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_layer_that_differs_from_its_digest_fails_push(fault, sync, policy, client, probe, monkeypatch, dtype):
    sync.push(policy, version=1)
    before = copy.deepcopy(policy)
    policies.train_on(policy, 0.02)
    with monkeypatch.context() as tampered:
        FAULTS[fault](tampered, before, policy)
        with pytest.raises(ProofError, match=rf"{LAYER}.*digests") as caught:
            sync.push(policy, version=2)
    assert ("layers.0.mlp.down_proj" in str(caught.value)) is (fault == "permuted")
    assert "visual" not in str(caught.value)
    assert client.weight_version() == "1"
    sync.push(policy, version=3)
    policies.verify(policy, probe, [client], tolerance=policies.TOLERANCES[dtype])


def test_digests_are_compared_after_merge_moved_to_learner(served, make_sync, base, monkeypatch):
    """`auto` moves to the learner; a fault there is not tried a third time."""
    policy = policies.adapter_of(base, "dora")
    sync = make_sync(served)
    sync.push(policy, version=1)
    monkeypatch.setattr(MergeLocation, "compare_folder", refuse_folder)
    sync.fleet.sessions[0].lose()
    before = copy.deepcopy(policy)
    policies.train_on(policy, 0.02)
    FAULTS["wrong"](monkeypatch, before, policy)
    with pytest.raises(ProofError, match=LAYER):
        sync.push(policy, version=2)
    assert sync.location.effective == "learner"


def refuse_folder(self, client, source):
    raise self._mismatch(client, "other weights")
