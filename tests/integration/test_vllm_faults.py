"""The fault table of pushes on real vLLM: each process killed and stopped in each phase, and all usable afterwards.

Usable: the next push goes through, and the server's log-probabilities are those of the learner that made it. The same
table on the stub is in test_struck_pushes, and what becomes of rollouts in test_fault_table. STAGE2_EXHAUSTIVE=1
tries every process in every phase, by each blow, over each transport.
"""

import contextlib
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from transformers import AutoProcessor

from stage2_api.errors import EXIT_RETRYABLE
from stage2_trainer.rollouts.build import check_identity
from stage2_trainer.wire.chat import CHAT_ROUTE
from stage2_trainer.wire.client import ServerClient
from tests.integration.conftest import LONG_S, patience
from tests.integration.strikes import (
    BLOWS,
    MERGED,
    TRANSPORTS,
    WHOLE,
    as_parameters,
    deadline_s,
    every_case,
    proved,
    push_to_struck,
    struck_learner,
    version_of,
    waiting_learner,
)

pytestmark = pytest.mark.vllm

BRIEF_S = 10.0  # for each call of the learner; then its server is stuck
CASE = ("push", "phase", "who", "blow", "transport")

# Of each common phase the server and its engine, of the others one; a restart of vLLM takes seconds.
STRUCK_EACH_TIME = {
    (WHOLE, "connect"): ("engine", signal.SIGKILL),
    (WHOLE, "begin"): ("server", signal.SIGKILL),
    (WHOLE, "pack"): ("engine", signal.SIGKILL),
    (WHOLE, "confirm"): ("engine", signal.SIGSTOP),
    (WHOLE, "finish"): ("server", signal.SIGSTOP),
    (MERGED, "connect"): ("server", signal.SIGSTOP),
    (MERGED, "begin"): ("engine", signal.SIGSTOP),
    (MERGED, "compare folders"): ("server", signal.SIGKILL),
    (MERGED, "pack"): ("server", signal.SIGSTOP),
    (MERGED, "merge"): ("engine", signal.SIGSTOP),
    (MERGED, "confirm"): ("server", signal.SIGKILL),
    (MERGED, "finish"): ("engine", signal.SIGKILL),
    (MERGED, "proof"): ("server", signal.SIGSTOP),
}


def is_tried(push, phase, who, blow, transport):
    """Whether a case is tried each time; a learner in each phase, over each transport in some."""
    turn = push.phases.index(phase)
    if who == "learner":
        return push is MERGED and (BLOWS.index(blow), TRANSPORTS.index(transport)) == (turn % 2, turn // 2 % 2)
    return STRUCK_EACH_TIME.get((push, phase)) == (who, blow) and transport == "tcp"


def engine_of(served):
    """Return the process that computes: of a server's group the largest that its first process has started."""
    sizes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[2]) == served.process.pid != int(stat.parent.name):
                sizes[int(stat.parent.name)] = int(fields[21])
    return max(sizes, key=sizes.__getitem__)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(CASE, as_parameters(every_case("server", "engine"), is_tried))
def test_killed_or_stopped_vllm_server_is_dropped_and_takes_next_push(
    servers, renewed, make_sync, policy_of, token, probe, push, phase, who, blow, transport
):
    healthy, struck = servers("stub", transport=transport), renewed("vllm", transport=transport)
    synchronizer = proved(make_sync(healthy, struck, timeout_s=deadline_s(blow), **push.options()), probe)
    engine = engine_of(struck) if who == "engine" else None
    push_to_struck(synchronizer, policy_of(push), healthy, struck, phase, blow, token, engine)
    struck = renewed("vllm", transport=transport)
    report = synchronizer.ensure_synced(policy_of(push), 3)
    assert report.merge == ("server" if push is MERGED else "learner")
    assert {version_of(one, token) for one in (healthy, struck)} == {"3"}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(CASE, as_parameters(every_case("learner"), is_tried))
def test_vllm_server_of_killed_or_stopped_learner_takes_push_of_next_learner(
    renewed, make_sync, policy_of, token, probe, model_path, push, phase, who, blow, transport
):
    served = renewed("vllm", transport=transport)
    client = ServerClient(served.base_url, token, timeout_s=LONG_S)
    processor, ids = AutoProcessor.from_pretrained(model_path), probe.inputs["input_ids"][0].tolist()
    with struck_learner(served, model_path, token, push, phase, blow):
        check_identity([client], processor, probe.messages, ids)  # asks for an answer before the next push
        proved(make_sync(served, **push.options()), probe).ensure_synced(policy_of(push), 5)
    assert version_of(served, token) == "5"


def test_health_fails_only_while_engine_hangs_in_push(renewed, make_sync, policy_of, token, probe, model_path):
    served = renewed("vllm")
    engine = engine_of(served)
    with waiting_learner(served, model_path, token, WHOLE, "pack", timeout_s=patience(BRIEF_S), who=engine) as learner:
        assert health_of(served) == 200
        learner.kill()
    until_health_is(served, 503)
    os.kill(engine, signal.SIGCONT)
    until_health_is(served, 200)
    proved(make_sync(served), probe).ensure_synced(policy_of(WHOLE), 7)


def health_of(served):
    return httpx.get(f"{served.base_url}/health", trust_env=False, timeout=30).status_code


def until_health_is(served, status):
    while health_of(served) != status:
        assert served.process.poll() is None
        time.sleep(0.2)


def ask_until_refused(http):
    """Ask again and again; return the first status that is not 200, or what kept an answer from coming."""
    body = {"messages": [{"role": "user", "content": "Go on."}], "max_tokens": 900, "ignore_eos": True}
    try:
        while (status := http.post(CHAT_ROUTE, json=body).status_code) == 200:
            pass
    except httpx.HTTPError as error:
        return error
    return status


def test_stopping_server_ends_every_waiting_request(renewed, token):
    served, known = renewed("vllm"), {"Authorization": f"Bearer {token}"}
    with ThreadPoolExecutor() as pool, httpx.Client(base_url=served.base_url, headers=known, timeout=LONG_S) as http:
        asked = [pool.submit(ask_until_refused, http) for _ in range(8)]
        while not re.search(r"^vllm:num_requests_running{.*} [1-9]", http.get("/metrics").text, re.MULTILINE):
            time.sleep(0.05)
        os.kill(served.process.pid, signal.SIGTERM)
        ends = [one.result() for one in asked]
    assert all(end == 503 or isinstance(end, (httpx.NetworkError, httpx.RemoteProtocolError)) for end in ends), ends
    assert served.process.wait(timeout=patience(15)) == EXIT_RETRYABLE
