"""A work queue for level-triggered reconciling: one call at a time for each key, coalesced, bounded, with backoff.

kopf never retries an `on.event` handler, and its timers force finalizers. This queue retries, and calls again later.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")


logger = logging.getLogger(__name__)


class RetryLater(Exception):
    """A pass could not finish, for a reason that is reported elsewhere: retry with backoff, log no traceback."""


class Broken(RetryLater):
    """A pass met a bug of the controller, which is reported and logged already."""


class WorkQueue(Generic[Item]):
    """Calls `work(key)` for every key that was added since its last call began.

    `work` returns the seconds until its next call, or None. After an exception it is called again after `backoff_s`,
    doubled for each failure in a row up to `backoff_max_s`. At most `concurrency` calls run at once. Owners of keys
    (`owner_of`) take turns; the keys of one owner are called in the order in which they came.

    What is added within `rest_s` of a key's last call becomes one call at the end of that time: a call causes a burst
    of events. Calls that `work` itself requested do not wait for the rest.
    """

    def __init__(
        self,
        work: Callable[[Item], Awaitable[float | None]],
        *,
        owner_of: Callable[[Item], Hashable] = lambda key: None,
        concurrency: int = 8,
        rest_s: float = 0.0,
        backoff_s: float = 1.0,
        backoff_max_s: float = 300.0,
    ) -> None:
        self._work = work
        self._owner_of = owner_of
        self._concurrency = concurrency
        self._rest_s = rest_s
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._turns: OrderedDict[Hashable, deque[Item]] = OrderedDict()  # keys by owner; the next owner first
        self._ready = asyncio.Semaphore(0)  # as many as wait in _turns
        self._worked_on: dict[Item, float] = {}  # until when each rests; 0 during a call
        self._waiting: set[Item] = set()  # in _turns, which also has keys that were forgotten meanwhile
        self._active: set[Item] = set()  # in a call
        self._again: dict[Item, bool] = {}  # added during its call, and whether that skips the rest
        self._timers: dict[Item, asyncio.TimerHandle] = {}
        self._failures: dict[Item, int] = {}

    def add(self, key: Item) -> None:
        """Request a call as soon as the key has rested and a worker is free; many requests before it are one call."""
        if key not in self._waiting and (left_s := self._rest_left_s(key)) > 0:
            self.add_after(key, left_s)
        else:
            self._request(key, at_once=False)

    def add_now(self, key: Item) -> None:
        """Request a call as soon as a worker is free, whether the key has rested or not."""
        self._request(key, at_once=True)

    def _rest_left_s(self, key: Item) -> float:
        rests_until = self._worked_on.get(key)
        return rests_until - asyncio.get_running_loop().time() if rests_until else 0.0

    def _request(self, key: Item, *, at_once: bool) -> None:
        self._cancel_timer(key)
        if key in self._active:
            self._again[key] = at_once or self._again.get(key, False)
        elif key not in self._waiting:
            self._waiting.add(key)
            self._turns.setdefault(self._owner_of(key), deque()).append(key)
            self._ready.release()

    def add_after(self, key: Item, delay_s: float) -> None:
        """Request a call in `delay_s` seconds; the sooner of this and an earlier request wins."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is None or timer.when() > loop.time() + delay_s:
            self._cancel_timer(key)
            self._timers[key] = loop.call_later(delay_s, self.add_now, key)

    def forget(self, key: Item) -> None:
        """Drop the requests of a key whose object is gone. A call that has begun ends, and requests nothing."""
        self._cancel_timer(key)
        self._waiting.discard(key)  # its turn is skipped
        self._again.pop(key, None)
        self._failures.pop(key, None)
        self._worked_on.pop(key, None)

    def depth(self) -> int:
        """Return how many keys wait for a worker."""
        return len(self._waiting)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as workers:
            for _ in range(self._concurrency):
                workers.create_task(self._worker())

    async def _worker(self) -> None:
        while True:
            await self._ready.acquire()
            key = self._next()
            if key in self._waiting:  # not forgotten meanwhile
                self._waiting.discard(key)
                await self._serve(key)

    def _next(self) -> Item:
        owner, keys = self._turns.popitem(last=False)
        key = keys.popleft()
        if keys:
            self._turns[owner] = keys  # the last owner now
        return key

    async def _serve(self, key: Item) -> None:
        """Make a call for the key and request the next one, unless the key was forgotten during the call."""
        self._worked_on[key] = 0.0
        self._active.add(key)
        try:
            delay_s = await self._call(key)
        finally:
            self._active.discard(key)
        if key in self._worked_on:
            self._worked_on[key] = asyncio.get_running_loop().time() + self._rest_s
            if delay_s is not None:
                self.add_after(key, delay_s)
        else:
            self._failures.pop(key, None)
        if key in self._again:
            (self.add_now if self._again.pop(key) else self.add)(key)

    async def _call(self, key: Item) -> float | None:
        """Return the seconds until the next call."""
        try:
            delay_s = await self._work(key)
        except RetryLater as reason:
            delay_s = self._next_backoff(key)
            logger.warning("%s: %s; retrying in %.0f s", key, reason, delay_s)
        except Exception:  # no pass may end the worker, which serves other jobs too
            delay_s = self._next_backoff(key)
            logger.exception("%s: pass failed; retrying in %.0f s", key, delay_s)
        else:
            self._failures.pop(key, None)
        return delay_s

    def _next_backoff(self, key: Item) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return min(self._backoff_s * 2.0 ** min(failures - 1, 30), self._backoff_max_s)

    def _cancel_timer(self, key: Item) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
