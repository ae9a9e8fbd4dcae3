"""The fault table of pushes on real vLLM: each process killed and stopped in each phase, and all usable afterwards.

Usable: the next push goes through, and the server's log-probabilities are those of the learner that made it. The same
table on the stub, and what becomes of rollouts, is in test_fault_table. Every second case is tried, so that each
process is struck in each phase and by each blow; STAGE2_EVERY_STRIKE=1 tries them all.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from stage2_trainer.weights.verify import FLOAT32_TOLERANCE, verify
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.integration import policies
from tests.integration.conftest import patience
from tests.integration.strikes import (
    BLOWS,
    PHASES,
    strike,
    struck_learner,
    version_of,
    when_it_comes_to,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.vllm]

TIMEOUT_S = patience(4.0)
SMALL_BUCKETS = 400_000
EVERY = [(phase, who, blow) for phase in PHASES for who in ("server", "engine", "learner") for blow in BLOWS]
STRIKES = (
    EVERY
    if os.environ.get("STAGE2_EVERY_STRIKE")
    else [
        (phase, who, blow)
        for phase, who, blow in EVERY
        if (PHASES.index(phase) + ("server", "engine", "learner").index(who) + BLOWS.index(blow)) % 2
    ]
)


@pytest.fixture(scope="module")
def policy(base):
    return policies.trained(base, "full")


def engine_of(served):
    """Return the process that computes: of a server's group the largest that its first process has started."""
    sizes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[2]) == served.process.pid != int(stat.parent.name):
                sizes[int(stat.parent.name)] = int(fields[21])
    return max(sizes, key=sizes.__getitem__)


@pytest.fixture
def prove(token, probe):
    """A function that fails where a server does not answer as a policy does."""

    def prove(served, model):
        client = ServerClient(served.base_url, token, timeout_s=60)
        with contextlib.closing(client):
            verify(model, probe, [client], tolerance=FLOAT32_TOLERANCE)

    return prove


@pytest.mark.parametrize(("phase", "who", "blow"), [one for one in STRIKES if one[1] != "learner"])
def test_a_server_struck_in_a_phase_of_a_push_costs_only_itself_and_takes_the_next_one(
    servers, renewed, make_sync, base, policy, token, prove, phase, who, blow
):
    healthy, struck = servers("stub"), renewed("vllm")
    sync = make_sync(healthy, struck, timeout_s=TIMEOUT_S, bucket_bytes=SMALL_BUCKETS)
    engine = engine_of(struck)
    undo = when_it_comes_to(phase, lambda: os.kill(engine, blow) if who == "engine" else strike(struck, blow))
    try:
        with pytest.raises(ServerError) as caught:
            sync.sync(base, version=2)
    finally:
        undo()
        strike(struck, signal.SIGCONT)
    assert caught.value.server == struck.base_url
    assert version_of(healthy, token) == "2"
    if blow == signal.SIGKILL:
        struck.process.wait(60)
        struck = renewed("vllm")
    sync.sync(policy, version=3)
    assert {version_of(one, token) for one in (healthy, struck)} == {"3"}
    prove(struck, policy)


@pytest.mark.parametrize(("phase", "blow"), [(phase, blow) for phase, who, blow in STRIKES if who == "learner"])
def test_the_server_of_a_learner_struck_in_a_phase_of_a_push_takes_the_next_ones(
    renewed, make_sync, policy, token, prove, model_path, phase, blow
):
    served = renewed("vllm")
    with struck_learner(served, model_path, token, phase, blow):
        make_sync(served, timeout_s=60.0).sync(policy, version=5)
        prove(served, policy)
