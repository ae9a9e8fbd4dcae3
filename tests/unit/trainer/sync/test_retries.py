"""The product of a push's retries, counted here, is what the code does and the documentation says."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stage2_api.vllm import ServerAddress, VllmServer, VllmSync
from stage2_trainer.rollouts.rollout_source import GenerationRequest, ServerRollouts
from stage2_trainer.sync.fleet.proof import Prover
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.fleet.retries import ANSWER_GRACE_S, ATTEMPTS, PROOFS, REQUESTS
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.client import HEALTH_TIMEOUT_S, POLL_INTERVAL_S
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout
from stage2_trainer.wire.update_routes import START_ROUTE

URL = "http://127.0.0.1:1"
TIMEOUT_S = 60.0
MODEL = torch.nn.Linear(1, 1)
LOST = ServerError(URL, "push", "went away")
SEMANTICS = Path(__file__).parents[4] / "docs" / "semantics.md"

CHANGES, OPENS = 2, 2
PUSHES = REQUESTS * ATTEMPTS + CHANGES
"""Of one step's weights, at most."""
BEGIN_CALLS, CLOSING_CALLS, FINISH_CALLS = 3, 3, 7
"""Of one server: calls that open an update, that first close one which was left open, and that close an update."""
GREETING_CALLS = 6
"""To one server that is back, before it takes part again."""
RESETS = 2
"""What a cache that is not free adds: the time for which its reset is repeated, and the last of these calls."""
ADAPTER_CALLS = 2
"""The list of a server's adapters, and one that it forgets. Each more that an earlier learner left costs another."""
JOIN_WAITS = 2
"""For a server's workers to dial, and for its call to end. NCCL adds two: the group's id, and the group."""


def push_s(timeout_s: float) -> float:
    """Return the seconds of one push of a bucket with its proof, at most, over TCP to servers that are sent the same.

    It is the sum of what each wait may last if the server answers each time at the last moment. Servers are called at
    once, so their number does not count; what the learner computes, and the lookup of names, are left out.
    """
    connect = 1 + JOIN_WAITS
    begin = OPENS - 1 + BEGIN_CALLS + CLOSING_CALLS  # an update that is opened again has taken one call
    folder, send = 1, 2
    finish = FINISH_CALLS + RESETS + ADAPTER_CALLS
    return (OPENS * connect + begin + folder + send + finish + PROOFS) * timeout_s + ANSWER_GRACE_S


def wait_s(timeout_s: float) -> float:
    """Return the seconds of one wait for servers, at most: a check may begin just before its end."""
    return timeout_s + POLL_INTERVAL_S + HEALTH_TIMEOUT_S


def lost_s(timeout_s: float) -> float:
    """Return the seconds after which a run ends whose only server stands still from a push on, at most.

    The push misses its first wait; the other attempts are waits in vain.
    """
    return timeout_s + (ATTEMPTS - 1) * wait_s(timeout_s)


def at_most_s(timeout_s: float) -> float:
    """Return the seconds of all pushes of one step to one server and of the waits between them, at most."""
    waits = REQUESTS * (ATTEMPTS - 1) + sum(range(REQUESTS))
    return PUSHES * push_s(timeout_s) + waits * (wait_s(timeout_s) + GREETING_CALLS * timeout_s)


class Clock:
    """A clock on which a wait takes no time, and lasts as long as it may."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "sleep", clock.wait)
    return clock


class SlowServer:
    """A server that answers each call at the last moment.

    fails: whether it reports another version at the end of each push. left_open: how often it finds an update open.
    """

    base_url, timeout_s = URL, TIMEOUT_S

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.fails = True
        self.versions_read = 0
        self.version = "default"
        self.left_open = 0

    def weight_version(self) -> str:
        self.clock.wait(TIMEOUT_S)
        self.versions_read += 1
        return self.version

    def post(self, path: str, phase: str, *, body: Any = None, timeout_s: float | None = None) -> dict[str, Any]:
        self.clock.wait(TIMEOUT_S)
        if path == START_ROUTE and self.left_open:
            self.left_open -= 1
            raise ServerError(URL, "start", "an update is open", status=500)
        if phase == "finish" and not self.fails:
            self.version = body["weight_version"]
        return {"success": True}

    def adapters(self) -> list[str]:
        self.clock.wait(TIMEOUT_S)
        return ["policy-1-aa"]

    def unload_adapter(self, name: str) -> None:
        self.clock.wait(TIMEOUT_S)


class SlowTransfer:
    """A transfer each of whose waits lasts as long as it may."""

    transport, staging, group, sent = "tcp", torch.device("cpu"), "first", 0

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def connect(self, client: SlowServer) -> None:
        self.clock.wait((1 + JOIN_WAITS) * TIMEOUT_S)

    def send(self, packed: Any) -> None:
        self.clock.wait(TIMEOUT_S)

    def aborter(self) -> Any:
        return lambda: None

    def disconnect(self) -> None: ...

    close = disconnect


class Backend:
    """Rollouts whose first `lost` requests are lost."""

    base_urls = (URL,)

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.asked = 0

    def generate(self, requests: Any, *, version: int | None = None, **_: Any) -> list[Rollout]:
        self.asked += 1
        if self.asked <= self.lost:
            raise LOST
        return [Rollout([1], [2], "", URL, version or 0, "stop") for _ in requests]


class FailingPush:
    """A push that succeeds only at the last try of each `attempts`."""

    def __init__(self) -> None:
        self.pushes = 0

    def push(self, model: Any, *, version: int) -> SyncReport:
        self.pushes += 1
        if self.pushes % ATTEMPTS:
            raise LOST
        return SyncReport.create(version, 1.0, [URL])


def rollouts_of(backend: Any, full: Any, wait: Any, prover: Any = None) -> ServerRollouts:
    return ServerRollouts(
        backend, WeightSync("full", full=full.push, prover=prover), seed=1, wait=wait, reporter=Reporter()
    )


def request() -> GenerationRequest:
    return GenerationRequest(MODEL, [[{"role": "user", "content": "x"}]], 3, 0, Stopwatch())


def test_number_of_pushes_of_one_step_is_requests_times_attempts() -> None:
    backend, push = Backend(lost=99), FailingPush()
    with pytest.raises(ServerError):
        rollouts_of(backend, push, lambda error: None).generate(request())
    assert backend.asked == REQUESTS
    assert push.pushes == REQUESTS * ATTEMPTS == PUSHES - CHANGES


def test_fallbacks_are_tried_once_per_run_and_add_to_number_of_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest chain of them: an adapter is refused, and servers that should merge cannot."""
    address, tries = ServerAddress(URL, 1), []
    full = FullPush([address], token="t", timeout_s=60.0, device=torch.device("cpu"))
    full.close()

    def push_once(model: Any, version: int) -> SyncReport:
        tries.append(full.location.effective)
        if full.location.at_server:
            full.location.mismatches.append("digests differ")
            raise LOST
        return SyncReport.create(version, 1.0, [URL])

    def refuse(model: Any, *, version: int) -> SyncReport:
        tries.append("adapter")
        raise ServerError(URL, "load adapter", "rank too high", status=400)

    monkeypatch.setattr(full, "_push_once", push_once)
    weights = WeightSync("auto", full=full.push, adapter=refuse)
    weights.ensure_synced(MODEL, 1)
    assert tries == ["adapter", "server", "learner"]
    assert len(tries) == 1 + CHANGES
    weights.ensure_synced(MODEL, 2)
    assert tries[3:] == ["learner"]


def test_doubtful_proof_is_retried_as_often_as_policy_allows() -> None:
    probe = SimpleNamespace(messages=[], inputs={"mm_token_type_ids": torch.zeros(1, 3)})
    asked: list[Any] = []

    def ask(client: Any, probe: Any, *, adapter: Any) -> torch.Tensor:
        asked.append(client)
        return torch.full((2,), 2e-4)

    prover = Prover(probe, [SimpleNamespace(base_url=URL)], ask=ask, every=1, tolerance=1e-4)
    prover._computed = lambda logprobs, model: torch.zeros(2)
    prover.prove_push(MODEL, step=1)
    assert len(asked) == PROOFS


def slow_fleet(clock: Clock) -> tuple[FullPush, SlowServer]:
    """A full push to one slow server of a model whose tensors are a bucket."""
    how = VllmSync(merge="learner")
    full = FullPush([ServerAddress(URL, 1)], token="t", timeout_s=TIMEOUT_S, device=torch.device("cpu"), how=how)
    full.close()
    server = SlowServer(clock)
    (session,) = full.fleet.sessions
    session.client, session.transfer = server, SlowTransfer(clock)
    return full, server


def test_push_to_slow_server_ends_within_documented_time(clock: Clock) -> None:
    full, server = slow_fleet(clock)
    server.fails = False
    full.push(MODEL, version=1)
    # it was restarted, and another learner that has died since left an update open
    server.version, server.left_open, server.versions_read, clock.now = "default", 1, 0, 0.0
    full.push(MODEL, version=2)
    assert server.versions_read == OPENS + 1, "at each opening, and to confirm"
    limit = push_s(TIMEOUT_S) - PROOFS * TIMEOUT_S  # nothing is proved here
    assert limit / 2 < clock.now <= limit


def test_all_pushes_and_waits_of_one_step_end_within_documented_time(clock: Clock) -> None:
    full, _ = slow_fleet(clock)
    waits = []

    def wait(error: ServerError) -> None:
        waits.append(error)
        clock.wait(wait_s(TIMEOUT_S))

    with pytest.raises(ServerError, match="reports weight version"):
        rollouts_of(Backend(0), full, wait).generate(request())
    assert len(waits) == ATTEMPTS - 1
    assert clock.now <= ATTEMPTS * push_s(TIMEOUT_S) + len(waits) * wait_s(TIMEOUT_S)
    assert clock.now < at_most_s(TIMEOUT_S)


def test_run_with_only_frozen_server_ends_within_documented_time(clock: Clock) -> None:
    full, server = slow_fleet(clock)

    def stand_still() -> str:
        clock.wait(TIMEOUT_S)
        raise ServerError(URL, "version", "no answer in time")

    def wait(error: ServerError) -> None:
        clock.wait(wait_s(TIMEOUT_S))
        raise ServerError(URL, "health", "not healthy within 60 s")

    server.fails = False
    rollouts = rollouts_of(Backend(0), full, wait)
    rollouts.generate(request())
    server.weight_version, clock.now = stand_still, 0.0
    with pytest.raises(ServerError, match="not healthy"):
        rollouts.sync(MODEL, global_step=4, stopwatch=Stopwatch())
    assert clock.now == lost_s(TIMEOUT_S)


def test_documented_retry_figures_equal_policy() -> None:
    text = " ".join(SEMANTICS.read_text(encoding="utf-8").split())
    timeout_s = VllmServer().timeout_s
    assert f"{PUSHES} pushes" in text
    assert f"after {lost_s(timeout_s):.0f} s" in text
    assert f"at most {push_s(timeout_s) / 3600:.1f} hours" in text
    assert f"{at_most_s(timeout_s) / 3600:.0f} hours" in text
