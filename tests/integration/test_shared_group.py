"""One group for all servers of full training, over sockets in NCCL's place: sent once, and a break costs one push."""

import signal

import pytest

from stage2_api.vllm import VllmSync
from stage2_trainer.sync.tensors.merge import WeightAccess
from tests.integration import policies
from tests.integration.strikes import WHOLE, deadline_s, proved, push_to_struck, version_of

OPTIONS = {"access": WeightAccess(WHOLE.bucket_bytes), "how": VllmSync(one_group_from=2), "adapted": False}
TWICE = 1.9  # nearly


@pytest.fixture(scope="module")
def policy(base):
    return policies.trained(base, WHOLE.policy)


def test_shared_group_sends_each_byte_once_to_all_servers(servers, renewed, make_sync, policy, probe, token):
    both = servers("stub", transport="nccl"), renewed("stub", transport="nccl")
    synchronizer = proved(make_sync(*both, **OPTIONS), probe)
    for version in (1, 2):
        report = synchronizer.ensure_synced(policy, version)
        assert report.bytes <= report.wire_bytes < TWICE * report.bytes
    assert {version_of(one, token) for one in both} == {"2"}


@pytest.mark.parametrize(
    ("phase", "blow"),
    [("connect", signal.SIGKILL), ("pack", signal.SIGSTOP), ("confirm", signal.SIGSTOP), ("finish", signal.SIGKILL)],
)
def test_killed_or_stopped_server_costs_others_one_push(servers, renewed, make_sync, policy, probe, token, phase, blow):
    healthy, struck = servers("stub", transport="nccl"), renewed("stub", transport="nccl")
    sync = make_sync(healthy, struck, timeout_s=deadline_s(blow), **OPTIONS)
    synchronizer = proved(sync, probe)
    push_to_struck(synchronizer, policy, healthy, struck, phase, blow, token)
    renewed("stub", transport="nccl")
    report = synchronizer.ensure_synced(policy, 3)
    assert report.wire_bytes > TWICE * report.bytes  # over a group for each
    assert {version_of(one, token) for one in (healthy, struck)} == {"3"}
