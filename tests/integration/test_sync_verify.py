"""Proofs of a sync: their turn comes, they are passed by servers that hold the weights and by no others."""

import pytest
import torch

from stage2_trainer.sync.fleet.proof import Prover, learner_logprobs
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import ProofError
from stage2_trainer.wire.client import ServerClient
from tests.integration import policies

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def full(servers, make_sync):
    return make_sync(servers("stub"))


@pytest.fixture
def make_prover(servers, token, probe):
    client = ServerClient(servers("stub").base_url, token, timeout_s=30)
    return lambda **options: Prover(probe, [client], **options)


class Counting(Prover):
    """A prover that remembers which syncs it proved."""

    def prove(self, model, **options):
        reports = super().prove(model, **options)
        self.proved = [*getattr(self, "proved", []), bool(reports)]
        return reports


@pytest.mark.parametrize(("every", "proved"), [(0, [1, 0, 0, 0, 0]), (1, [1, 1, 1, 1, 1]), (2, [1, 0, 1, 0, 1])])
def test_the_first_sync_is_proved_and_every_kth_after_it(full, make_prover, base, every, proved):
    prover = make_prover(every=every)
    prover.__class__ = Counting
    policy = WeightSync("full", full=full, prover=prover)
    for step in range(5):
        policy.ensure_synced(base, step)
    assert prover.proved == [bool(p) for p in proved]


def test_a_sync_after_a_lost_server_is_proved_out_of_turn(full, make_prover, base):
    prover = make_prover(every=0)
    prover.__class__ = Counting
    policy = WeightSync("full", full=full, prover=prover)
    policy.ensure_synced(base, 0)
    policy.invalidate()
    policy.ensure_synced(base, 0)
    assert prover.proved == [True, True]


def test_a_server_with_other_weights_ends_the_run_and_is_named(full, make_prover, base, servers):
    class Wrong:
        def sync(self, model, *, version):
            return full.sync(policies.trained(base, "full"), version=version)

    policy = WeightSync("full", full=Wrong(), prover=make_prover(every=1))
    with pytest.raises(ProofError, match=f"on server {servers('stub').base_url}") as caught:
        policy.ensure_synced(base, 1)
    assert "vllm.sync.verify_tolerance" in str(caught.value)


def test_a_configured_tolerance_counts(full, make_prover, base):
    full.sync(policies.trained(base, "full"), version=1)
    assert len(make_prover(every=1, tolerance=1e4).prove(base, step=1)) == 1
    with pytest.raises(ProofError, match="limits 1e-09"):
        make_prover(every=1, tolerance=1e-9).prove(base, step=1)


def test_scoring_in_parts_is_scoring_at_once(base, probe, monkeypatch):
    at_once = learner_logprobs(base, probe.inputs)
    monkeypatch.setattr("stage2_trainer.sync.fleet.proof.SCORED_AT_ONCE", 7)
    assert torch.equal(learner_logprobs(base, probe.inputs), at_once)
    assert len(at_once) == probe.inputs["input_ids"].shape[1] - 1
