"""The fault table of pushes to the stub: each process struck in each phase, over both transports, and usable then.

Usable: the next push goes through, and the server's log-probabilities are those of the learner that made it. The same
table on real vLLM is in test_vllm_faults. Every second case is tried; STAGE2_EXHAUSTIVE=1 tries them all.
"""

import signal

import pytest
import torch

from stage2_api.errors import EXIT_RETRYABLE
from tests.integration import policies
from tests.integration.conftest import patience
from tests.integration.strikes import (
    BLOWS,
    MERGED,
    TRANSPORTS,
    as_parameters,
    deadline_s,
    every_case,
    proved,
    push_to_struck,
    strike,
    struck_learner,
    version_of,
    waiting_learner,
)

LONG_S = 250.0  # for which nothing here waits
GRACE_S = 30.0  # of a pod between SIGTERM and SIGKILL, by default
WHO = ("server", "learner")
CASE = ("push", "phase", "who", "blow", "transport")


def is_tried(push, phase, who, blow, transport):
    """Whether a case is tried each time: each process in each phase, by each blow and over each transport in some."""
    turn = push.phases.index(phase)
    if (turn + WHO.index(who) + BLOWS.index(blow)) % 2:
        return False
    return (turn // 2 + WHO.index(who) + TRANSPORTS.index(transport)) % 2 == 0


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(CASE, as_parameters(every_case("server"), is_tried))
def test_killed_or_stopped_server_is_named_and_takes_next_push(
    servers, renewed, make_sync, policy_of, probe, token, push, phase, who, blow, transport
):
    healthy, struck = servers("stub", transport=transport), renewed("stub", transport=transport)
    strike_and_push_again(healthy, struck, renewed, make_sync, policy_of(push), probe, token, push, phase, blow)


@pytest.mark.parametrize("blow", BLOWS)
def test_killed_or_stopped_server_merging_in_bfloat16_takes_next_push(
    servers, renewed, make_sync, model_path, probe, token, blow
):
    healthy, struck = servers("stub", "bfloat16"), renewed("stub", "bfloat16")
    policy = policies.trained(policies.load(model_path, torch.bfloat16), MERGED.policy)
    strike_and_push_again(healthy, struck, renewed, make_sync, policy, probe, token, MERGED, "merge", blow)


def strike_and_push_again(healthy, struck, renewed, make_sync, policy, probe, token, push, phase, blow):
    sync = make_sync(healthy, struck, timeout_s=deadline_s(blow), **push.options())
    synchronizer = proved(sync, probe)
    push_to_struck(synchronizer, policy, healthy, struck, phase, blow, token)
    struck = renewed("stub", struck.dtype, transport=struck.transport)
    report = synchronizer.ensure_synced(policy, 3)
    assert report.merge == ("server" if push is MERGED else "learner")
    assert {version_of(one, token) for one in (healthy, struck)} == {"3"}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(CASE, as_parameters(every_case("learner"), is_tried))
def test_server_of_killed_or_stopped_learner_takes_push_of_next_learner(
    renewed, make_sync, policy_of, probe, token, model_path, push, phase, who, blow, transport
):
    served = renewed("stub", transport=transport)
    with struck_learner(served, model_path, token, push, phase, blow):
        assert proved(make_sync(served, **push.options()), probe).ensure_synced(policy_of(push), 5).version == 5


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("phase", MERGED.phases)
def test_sigterm_ends_learner_with_hanging_push(renewed, make_sync, policy_of, probe, token, model_path, phase):
    """No call of NCCL, which no signal ends, keeps it."""
    served = renewed("stub", transport="nccl")
    with waiting_learner(served, model_path, token, MERGED, phase, timeout_s=LONG_S) as learner:
        learner.send_signal(signal.SIGTERM)
        assert learner.wait(timeout=patience(GRACE_S)) == EXIT_RETRYABLE
    strike(served, signal.SIGCONT)
    assert proved(make_sync(served, **MERGED.options()), probe).ensure_synced(policy_of(MERGED), 5).version == 5
