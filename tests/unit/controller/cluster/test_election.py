"""One candidate leads: the one that holds the Lease; a silent holder is replaced, a slow one notices."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from stage2_controller.cluster import election
from stage2_controller.cluster.election import DURATION_S, RENEW_S, Election


class Leases:
    """The one Lease of an API server, with its optimistic locking."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.away = False

    async def get(self, kind: str, namespace: str | None, name: str) -> Any:
        if self.away:
            raise TimeoutError
        return self.lease

    async def create(self, manifest: Any) -> Any:
        if self.lease is not None:
            return None
        self.lease = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "1"}}
        return self.lease

    async def replace(self, manifest: Any) -> Any:
        if self.lease is None or manifest["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return None
        version = str(int(self.lease["metadata"]["resourceVersion"]) + 1)
        self.lease = {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": version}}
        return self.lease


class Clock:
    """Time that passes when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def candidate(leases: Leases, clock: Clock, identity: str) -> Election:
    return Election(leases, name="stage2", namespace="s", identity=identity, clock=clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made, sleep = Clock(), asyncio.sleep

    async def pass_time(seconds: float) -> None:
        made.now += seconds
        await sleep(0)

    monkeypatch.setattr(election.asyncio, "sleep", pass_time)
    return made


async def test_first_candidate_leads_and_second_waits(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.acquire()
    assert not await second._attempt(5)
    assert leases.lease
    assert leases.lease["spec"]["holderIdentity"] == "a"


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, ValueError("no JSON")])
async def test_malformed_lease_answer_is_retried_soon(answer: Any, clock: Clock) -> None:
    leases, answers = Leases(), [answer]
    get = leases.get

    async def strange(kind: str, namespace: str | None, name: str) -> Any:
        found = answers.pop() if answers else await get(kind, namespace, name)
        if isinstance(found, Exception):
            raise found
        return found

    leases.get = strange  # type: ignore[method-assign]
    await candidate(leases, clock, "a").acquire()
    assert clock.now < DURATION_S


async def test_expired_lease_is_taken_over(clock: Clock) -> None:
    leases = Leases()
    await candidate(leases, clock, "a").acquire()
    second = candidate(leases, clock, "b")
    await second.acquire()
    assert clock.now >= DURATION_S
    assert leases.lease
    assert (leases.lease["spec"]["holderIdentity"], leases.lease["spec"]["leaseTransitions"]) == ("b", 1)


async def test_renewed_lease_is_never_taken_over(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    for _ in range(20):
        assert await first._attempt(5)
        assert not await second._attempt(5)
        clock.now += 5


async def test_leader_stops_when_lease_has_other_holder(clock: Clock) -> None:
    leases = Leases()
    first = candidate(leases, clock, "a")
    await first.acquire()
    assert leases.lease
    spec = {**leases.lease["spec"], "holderIdentity": "b"}
    leases.lease = {**leases.lease, "spec": spec, "metadata": {**leases.lease["metadata"], "resourceVersion": "99"}}
    await first.hold()
    assert clock.now < DURATION_S


async def test_leader_that_cannot_renew_stops_before_lease_expires(clock: Clock) -> None:
    leases = Leases()
    first = candidate(leases, clock, "a")
    await first.acquire()
    leases.away = True
    await first.hold()
    assert clock.now < DURATION_S


async def test_released_lease_is_free_at_once(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.acquire()
    await first.release()
    await second.acquire()
    assert clock.now == 0


class Instant(selectors.DefaultSelector):
    """Where everybody waits, the clock goes on at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now += timeout or 0
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop that lives by a clock of ours."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Instant(clock))
        self._clock = clock

    def time(self) -> float:
        return self._clock()


def live(clock: Clock, story: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner:
        runner.run(story)


class SlowLeases(Leases):
    """Answers come `answer_s` late; from the renewal number `hangs_after` on, none comes at all."""

    def __init__(self, clock: Clock, *, answer_s: float, hangs_after: int) -> None:
        super().__init__()
        self._clock, self._answer_s, self._left = clock, answer_s, hangs_after
        self.written_at = 0.0

    async def get(self, kind: str, namespace: str | None, name: str) -> Any:
        if self._left <= 0:
            await asyncio.Event().wait()
        return await super().get(kind, namespace, name)

    async def replace(self, manifest: Any) -> Any:
        written = await super().replace(manifest)
        self.written_at, self._left = self._clock(), self._left - 1
        await asyncio.sleep(self._answer_s)  # by the clock: the test's own
        return written


async def lead(leases: Leases, clock: Clock) -> None:
    first = candidate(leases, clock, "a")
    await first.acquire()
    await first.hold()


@pytest.mark.parametrize("answer_s", [0.0, 1.0, 4.9])
def test_leader_with_hanging_requests_stops_before_lease_expires(answer_s: float) -> None:
    clock = Clock()
    leases = SlowLeases(clock, answer_s=answer_s, hangs_after=2)
    live(clock, lead(leases, clock))
    assert leases.written_at > 0
    assert clock.now - leases.written_at <= RENEW_S + 0.001


def test_late_answer_does_not_count_as_renewal() -> None:
    clock = Clock()
    live(clock, lead(SlowLeases(clock, answer_s=6.0, hangs_after=99), clock))
    assert clock.now <= RENEW_S + 0.001


def test_slow_but_answering_api_server_causes_no_change_of_leader() -> None:
    clock = Clock()
    leases = SlowLeases(clock, answer_s=3.0, hangs_after=99)
    led: list[float] = []

    async def other() -> None:
        await candidate(leases, clock, "b").acquire()
        led.append(clock.now)

    async def story() -> None:
        first = candidate(leases, clock, "a")
        await first.acquire()
        tasks = [asyncio.create_task(first.hold()), asyncio.create_task(other())]
        await asyncio.sleep(100)  # by the clock: the test's own
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()

    live(clock, story())
    assert led == []
