"""Freshness of the watches: what they delivered is compared with lists, which fill the store and expose a deaf watch.

A watch can go silent while the process looks healthy; liveness here means that what is listed was also delivered.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from stage2_controller import store
from stage2_controller.cluster.api_server import ApiRefused, Lister, Pager
from stage2_controller.observed import Object
from stage2_controller.place.capacity import Capacity
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store, key_of

logger = logging.getLogger(__name__)

FIELDS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""The field selector of pods that take room; one that ends, or begins, leaves or enters the watch by it."""
_RELIST_S = 240
_RETRY_S = 2.0
_DEAF_S = 600.0  # without a whole list; there is one at least each _RELIST_S


Events = Callable[[str], AsyncIterator[Object]]  # from a resource version on


class Watch(Protocol):
    """A function that opens a watch; `stage2_controller.cluster.api_server.Api.watch` is one."""

    async def __call__(self, kind: str, version: str, *, ends_after_s: int, fields: str) -> aiohttp.ClientResponse:
        """Return the answer, whose lines are events."""
        ...


class ClusterPodsWatch:
    """A watch that keeps the account of room true for the pods of all namespaces."""

    def __init__(self, api: Pager, capacity: Capacity, events: Events) -> None:
        self._api = api
        self._capacity = capacity
        self._events = events
        self._version = ""
        self._listed_at: float | None = None

    async def fill(self) -> None:
        """Count all pods that exist. Raise ApiRefused."""
        version, present = "", set()
        async for page in self._api.pages("Pod", None, labels=None, fields=FIELDS):
            version = version or page["metadata"]["resourceVersion"]
            for body in page["items"]:
                self._capacity.put("Pod", body)
                present.add(body["metadata"]["uid"])
        self._version = version
        self._capacity.retain_pods(present, int(version))
        self._listed_at = time.monotonic()

    def problem(self) -> str | None:
        """Return why the account of room is not true any more; None while it is, or before the first list."""
        silent_s = time.monotonic() - self._listed_at if self._listed_at is not None else 0.0
        return f"no whole list of the pods of all namespaces for {silent_s:.0f} s" if silent_s > _DEAF_S else None

    async def fill_for_sure(self, give_up_after_s: float = math.inf) -> None:
        """Count all pods that exist, however often that has to be tried. Raise what keeps refusing it for so long."""
        began = time.monotonic()
        while True:
            try:
                return await self.fill()
            except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() - began >= give_up_after_s:
                    raise
                logger.warning("cannot list the pods of all namespaces: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def run(self) -> None:
        """Follow what changes until cancelled; a watch that ends or breaks begins again with a list."""
        while True:
            try:
                async for event in self._events(self._version):
                    keep = self._capacity.remove if event["type"] == "DELETED" else self._capacity.put
                    keep("Pod", event["object"])
            except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
                logger.warning("the watch on the pods of all namespaces begins again: %s", error)
            await asyncio.sleep(_RETRY_S)  # also after a good end: one that always ends at once must not become a storm
            await self.fill_for_sure()


def pod_events(watch: Watch) -> Events:
    """Return the API server's watch on all pods, as plain dictionaries; it ends after some minutes."""

    async def follow(version: str) -> AsyncIterator[Object]:
        answer = await watch("Pod", version, ends_after_s=_RELIST_S, fields=FIELDS)
        try:
            async for line in _lines(answer.content):
                event = store.read(line)
                if event["type"] == "ERROR":  # such as a version that is too old: a new list begins anew
                    return
                yield event
        finally:
            answer.close()

    return follow


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Whole lines of any length: aiohttp's own reader refuses long ones, and a pod may be one."""
    rest = b""
    async for chunk in content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


_FIRST_S = 5.0
_DEAF_AFTER = 3  # rounds in a row that found something undelivered


@dataclass(frozen=True)
class Scope:
    """The scope of the watches: the namespaces (empty: all), and whether Kueue's Workloads are watched."""

    namespaces: Sequence[str] = ()
    kueue: bool = False


class Freshness:
    """A comparison that lists every kind each `interval_s`, mends the store, and tells the queue what was missed."""

    def __init__(
        self,
        api: Lister,
        store: Store,
        enqueue: Callable[[Key], None],
        *,
        scope: Scope,
        interval_s: float = 120.0,
        grace_s: float = 15.0,
        capacity: Capacity | None = None,
    ) -> None:
        self._api = api
        self._store = store
        self._enqueue = enqueue
        self._namespaces: Sequence[str | None] = scope.namespaces or (None,)
        self._interval_s = interval_s
        self._grace_s = grace_s
        self._capacity = capacity
        self._kinds = [resource.kind for resource in kinds.watched(kueue=scope.kueue)]
        self._rounds_behind = 0
        self._last_round = time.monotonic()

    async def try_lists(self) -> None:
        """Ask for one object of each kind that one that leads lists. Raise what the API server refuses."""
        of_jobs = [(kind, scope) for kind in self._kinds for scope in self._namespaces]
        of_room = [("Node", None), ("Pod", None)] if self._capacity else []
        for kind, scope in dict.fromkeys((*of_jobs, *of_room)):
            await self._api.try_list(kind, scope)

    async def fill(self) -> None:
        """Put everything that exists into the store: a plan made from half a picture would create what is there."""
        for kind in self._kinds:
            listed, _ = await self._list(kind)
            for body in listed:
                self._store.put(kind, body)
        await self._count_nodes()
        self._last_round = time.monotonic()

    async def run(self) -> None:
        """Compare until cancelled; soon at first, for what vanished between `fill` and the watches' own first list."""
        wait_s = min(_FIRST_S, self._interval_s)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = self._interval_s
            try:
                await self.round()
            except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:  # the probe fails if the API stays away
                logger.warning("cannot compare the watches with lists: %s", error)

    async def round(self) -> None:
        """Compare once."""
        missed = 0
        for kind in self._kinds:
            missed += await self._compare(kind)
        await self._count_nodes()
        self._release_unknown()
        self._rounds_behind = self._rounds_behind + 1 if missed else 0
        self._last_round = time.monotonic()

    def problem(self) -> str | None:
        """Return why the controller should be started anew; None while it hears what happens."""
        silent_s = self.age_s()
        if silent_s > 5 * self._interval_s:
            return f"no successful list for {silent_s:.0f} s"
        if self._rounds_behind >= _DEAF_AFTER:
            return f"the watches missed changes in {self._rounds_behind} rounds in a row"
        return None

    def age_s(self) -> float:
        """Return seconds since the last round."""
        return time.monotonic() - self._last_round

    async def _count_nodes(self) -> None:
        if self._capacity:
            listed = await self._api.list("Node", None, labelled=False)
            self._capacity.retain_nodes(listed["items"], int(listed["metadata"]["resourceVersion"]))

    def _release_unknown(self) -> None:
        """End the claims of jobs that do not exist: room that is kept for nobody would be missing for good."""
        if self._capacity:
            jobs = (job["metadata"] for job in self._store.known(names.KIND))
            self._capacity.retain_jobs({Key(job["namespace"], job["name"]) for job in jobs})

    async def _compare(self, kind: str) -> int:
        listed, version = await self._list(kind)
        if not self._store.behind(kind, listed) and not self._store.vanished(kind, listed, version):
            return 0
        await asyncio.sleep(self._grace_s)  # a change on its way is no missed one
        return self._mend(kind, listed, version)

    def _mend(self, kind: str, listed: Sequence[Object], version: int) -> int:
        behind = self._store.behind(kind, listed)
        gone = self._store.vanished(kind, listed, version)
        for body in behind:
            self._store.put(kind, body)
        for body in gone:
            self._store.remove(kind, body)
        for body in (*behind, *gone):
            logger.warning("the watch missed a change of %s %s", kind, body["metadata"]["name"])
            if key := key_of(kind, body):
                self._enqueue(key)
        return len(behind) + len(gone)

    async def _list(self, kind: str) -> tuple[list[Object], int]:
        """The objects of a kind in all scopes, and the oldest resource version of the lists."""
        answers = [await self._api.list(kind, scope, labelled=kind != names.KIND) for scope in self._namespaces]
        items: list[Object] = [item for answer in answers for item in answer["items"]]
        return items, min(int(answer["metadata"]["resourceVersion"]) for answer in answers)
