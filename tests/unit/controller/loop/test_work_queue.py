"""The work queue: coalescing, one call at a time for a key, bounded concurrency, backoff, turns for owners."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from stage2_controller.job.names import Key
from stage2_controller.loop.work_queue import RetryLater, WorkQueue


@asynccontextmanager
async def running(work: Callable[[str], Awaitable[float | None]], **options: Any) -> AsyncIterator[WorkQueue[str]]:
    """A queue that runs until the test leaves it."""
    queue = WorkQueue(work, **options)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Work:
    """Records its calls; each waits for `gate`, then does what `then` says."""

    def __init__(self, then: Callable[[str, int], float | None] = lambda key, count: None, *, held: bool = False):
        self.calls: list[str] = []
        self.active = 0
        self.most_active = 0
        self.gate = asyncio.Event()
        if not held:
            self.gate.set()
        self._then = then

    async def __call__(self, key: str) -> float | None:
        self.calls.append(key)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await self.gate.wait()
            return self._then(key, self.calls.count(key))
        finally:
            self.active -= 1


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), timeout=10)


async def settled() -> None:
    """Lets every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_additions_before_call_are_coalesced() -> None:
    work = Work()
    async with running(work) as queue:
        for _ in range(5):
            queue.add("a")
        await until(lambda: bool(work.calls))
        await settled()
    assert work.calls == ["a"]


async def test_additions_during_call_cause_single_later_call() -> None:
    work = Work(held=True)
    async with running(work) as queue:
        queue.add("a")
        await until(lambda: work.active == 1)
        queue.add("a")
        queue.add("a")
        await settled()
        assert work.calls == ["a"], "never two calls for one key at once"
        work.gate.set()
        await until(lambda: len(work.calls) == 2)
        await settled()
    assert work.calls == ["a", "a"]


@pytest.mark.parametrize("during_the_call", [True, False])
async def test_additions_wait_until_key_has_rested(during_the_call: bool) -> None:
    work = Work(held=during_the_call)
    async with running(work, rest_s=3600) as queue:
        queue.add("a")
        await until(lambda: bool(work.calls))
        for _ in range(5):
            await settled()
            queue.add("a")
        work.gate.set()
        await settled()
        assert (work.active, queue.depth()) == (0, 0)
    assert work.calls == ["a"]


async def test_waiting_additions_are_coalesced_after_rest() -> None:
    work = Work(held=True)
    async with running(work, rest_s=0.001) as queue:
        queue.add("a")
        await until(lambda: work.active == 1)
        for _ in range(5):
            queue.add("a")
        work.gate.set()
        await until(lambda: len(work.calls) == 2)
        await until(lambda: work.active == 0)
    assert work.calls == ["a", "a"]


@pytest.mark.parametrize("during_the_call", [True, False])
async def test_urgent_addition_skips_rest(during_the_call: bool) -> None:
    work = Work(held=True)
    async with running(work, rest_s=3600) as queue:
        queue.add("a")
        await until(lambda: work.active == 1)
        if during_the_call:
            queue.add_now("a")
            queue.add("a")
        work.gate.set()
        await until(lambda: work.active == 0)
        if not during_the_call:
            queue.add_now("a")
        await until(lambda: len(work.calls) == 2)
    assert work.calls == ["a", "a"]


async def test_resting_key_blocks_neither_other_keys_nor_its_own_requested_delay() -> None:
    work = Work(lambda key, count: 0.001 if key == "a" and count < 3 else None)
    async with running(work, rest_s=3600) as queue:
        queue.add("a")
        await until(lambda: work.calls == ["a"] * 3)
        queue.add("b")
        await until(lambda: work.calls == [*["a"] * 3, "b"])


async def test_forgotten_key_does_not_rest_when_added_again() -> None:
    work = Work()
    async with running(work, rest_s=3600) as queue:
        queue.add("a")
        await until(lambda: bool(work.calls))
        await settled()
        queue.forget("a")
        queue.add("a")
        await until(lambda: len(work.calls) == 2)


async def test_concurrent_calls_are_limited() -> None:
    work = Work(held=True)
    async with running(work, concurrency=3) as queue:
        for index in range(10):
            queue.add(f"job-{index}")
        await until(lambda: work.active == 3)
        await settled()
        assert work.active == 3
        assert queue.depth() == 7
        work.gate.set()
        await until(lambda: len(work.calls) == 10)
    assert work.most_active == 3


async def test_failing_call_does_not_stop_other_keys() -> None:
    def break_on_a(key: str, count: int) -> None:
        if key == "a":
            raise RuntimeError("boom")

    work = Work(break_on_a)
    async with running(work, concurrency=1, backoff_s=3600) as queue:
        queue.add("a")
        queue.add("b")
        await until(lambda: work.calls == ["a", "b"])


async def test_backoff_doubles_up_to_limit_and_resets_after_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_but_for_the_sixth(key: str, count: int) -> float:
        if count == 6:
            return 0.5
        raise RetryLater("quota")

    pauses: list[float] = []

    def note(queue: WorkQueue[str], key: str, delay_s: float) -> None:
        pauses.append(delay_s)
        asyncio.get_running_loop().call_soon(queue.add, key)  # at once, the worker would never let another task run

    monkeypatch.setattr(WorkQueue, "add_after", note)
    async with running(Work(fail_but_for_the_sixth), backoff_s=1.0, backoff_max_s=5.0) as queue:
        queue.add("a")
        await until(lambda: len(pauses) >= 8)
    assert pauses[:8] == [1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 1.0, 2.0]


async def test_forgotten_key_is_not_called_again() -> None:
    work = Work()
    async with running(work) as queue:
        queue.add_after("a", 0.001)
        queue.forget("a")
        queue.add_after("b", 0.005)
        await until(lambda: bool(work.calls))
    assert work.calls == ["b"]


def ends_well(key: str, count: int) -> None:
    """Want nothing more."""


def wants_another(key: str, count: int) -> float:
    """Want to be called again."""
    return 3600.0


def fails(key: str, count: int) -> None:
    """Want to be called again after the backoff."""
    raise RetryLater("quota")


@pytest.mark.parametrize("then", [ends_well, wants_another, fails])
async def test_forgotten_keys_leave_no_state(then: Callable[[str, int], float | None]) -> None:
    work = Work(then, held=True)
    keys = [f"job-{index}" for index in range(100)]
    async with running(work, concurrency=1, rest_s=3600, backoff_s=3600) as queue:
        for key in keys:
            queue.add(key)
        await until(lambda: work.active == 1)
        queue.add_now(keys[0])
        for key in keys:
            queue.forget(key)
        work.gate.set()
        await until(lambda: work.active == 0)
        await settled()
    kept = (queue._worked_on, queue._waiting, queue._active, queue._again, queue._timers, queue._failures)
    assert [len(one) for one in kept] == [0] * 6
    assert work.calls == keys[:1], "nobody is there for whom to work"


async def test_key_added_again_during_call_of_forgotten_key_is_called_again() -> None:
    work = Work(lambda key, count: 3600.0 if count == 1 else None, held=True)
    async with running(work, rest_s=3600) as queue:
        queue.add("a")
        await until(lambda: work.active == 1)
        queue.forget("a")
        queue.add("a")
        await settled()
        assert work.calls == ["a"], "never two calls for one key at once"
        work.gate.set()
        await until(lambda: len(work.calls) == 2)
        await settled()
        assert queue._timers == {}, "what the first call wanted was for the one that is gone"


async def test_sooner_of_two_delays_wins() -> None:
    work = Work()
    async with running(work) as queue:
        queue.add_after("a", 0.001)
        queue.add_after("a", 3600)
        await until(lambda: bool(work.calls))
    assert work.calls == ["a"]


async def test_owners_take_turns_and_their_keys_keep_order() -> None:
    work = Work(held=True)
    async with running(work, owner_of=lambda key: key[0], concurrency=1) as queue:
        queue.add("x")
        await until(lambda: work.active == 1)
        for key in ("a1", "a2", "a3", "b1", "c1", "c2"):
            queue.add(key)
        work.gate.set()
        await until(lambda: len(work.calls) == 7)
    assert work.calls[1:] == ["a1", "b1", "c1", "a2", "c2", "a3"]


async def test_requeued_job_is_not_starved_by_other_namespaces_thousand_jobs() -> None:
    calls: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        calls.append(key)
        if len(calls) == 1:
            for number in range(1000):
                queue.add(Key("storm", str(number)))
            queue.add(Key("quiet", "repair"))
        if calls.count(Key("quiet", "repair")) == 2:
            done.set()

    queue = WorkQueue(work, owner_of=lambda key: key.namespace, concurrency=1)
    queue.add(Key("quiet", "repair"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(queue.run())
        await asyncio.wait_for(done.wait(), timeout=10)
        running.cancel()
    assert calls[:3] == [Key("quiet", "repair"), Key("storm", "0"), Key("quiet", "repair")]
