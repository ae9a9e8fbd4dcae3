"""One candidate leads: the one that holds the Lease; a silent holder is replaced, a slow one notices."""

import asyncio
from typing import Any

import pytest

from stage2_controller import election
from stage2_controller.election import DURATION_S, Election


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


async def test_the_first_candidate_leads_and_the_second_waits(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.acquire()
    assert not await second._attempt()
    assert leases.lease
    assert leases.lease["spec"]["holderIdentity"] == "a"


async def test_a_lease_that_stays_as_it_is_for_its_duration_is_taken(clock: Clock) -> None:
    leases = Leases()
    await candidate(leases, clock, "a").acquire()
    second = candidate(leases, clock, "b")
    await second.acquire()
    assert clock.now >= DURATION_S
    assert leases.lease
    assert (leases.lease["spec"]["holderIdentity"], leases.lease["spec"]["leaseTransitions"]) == ("b", 1)


async def test_a_lease_that_is_renewed_is_never_taken(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    for _ in range(20):
        assert await first._attempt()
        assert not await second._attempt()
        clock.now += 5


async def test_a_leader_that_finds_another_holder_stops(clock: Clock) -> None:
    leases = Leases()
    first = candidate(leases, clock, "a")
    await first.acquire()
    assert leases.lease
    spec = {**leases.lease["spec"], "holderIdentity": "b"}
    leases.lease = {**leases.lease, "spec": spec, "metadata": {**leases.lease["metadata"], "resourceVersion": "99"}}
    await first.hold()
    assert clock.now < DURATION_S


async def test_a_leader_that_cannot_renew_stops_before_another_may_start(clock: Clock) -> None:
    leases = Leases()
    first = candidate(leases, clock, "a")
    await first.acquire()
    leases.away = True
    await first.hold()
    assert clock.now < DURATION_S


async def test_a_lease_that_is_given_up_is_free_at_once(clock: Clock) -> None:
    leases = Leases()
    first, second = candidate(leases, clock, "a"), candidate(leases, clock, "b")
    await first.acquire()
    await first.release()
    await second.acquire()
    assert clock.now == 0
