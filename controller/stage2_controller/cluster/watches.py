"""What keeps the controller's picture of the cluster true, beside kopf's watches on jobs and their children.

`Freshness` compares what those watches delivered with lists. A watch can go silent while the process looks healthy, so
liveness means here that what was listed was also delivered. `ClusterWatch` follows nodes, and the bound pods of every
namespace. kopf would hold all of them at once, several times over; these watches list in pages and keep only what
placement needs.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import aiohttp

from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.observed import Object
from stage2_controller.place.capacity import Capacity
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store, key_of

logger = logging.getLogger(__name__)

FAILURES = (ApiRefused, aiohttp.ClientError, TimeoutError)
"""What a request raises that the API server does not answer, or refuses."""
SELECTORS = {"Node": None, "Pod": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}
"""The field selectors of nodes, and of pods that take room on one."""
_INTERVAL_S = 120.0
_FIRST_COMPARISON_S = 5.0
_BEHIND_LIMIT = 3  # comparisons in a row that found something undelivered
_RELIST_S = 240
_RETRY_S = 2.0
_UNLISTED_LIMIT_S = 600.0  # nodes and pods are listed at least every _RELIST_S


class Freshness:
    """Lists every kind every two minutes, corrects the store, and queues the jobs whose changes the watches missed.

    namespaces: those that are served; empty: all. kueue: whether Kueue's Workloads are watched.
    """

    def __init__(
        self,
        api: Api,
        store: Store,
        enqueue: Callable[[Key], None],
        *,
        namespaces: Sequence[str] = (),
        kueue: bool = False,
        grace_s: float = 15.0,
        capacity: Capacity | None = None,
    ) -> None:
        self._api = api
        self._store = store
        self._enqueue = enqueue
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._grace_s = grace_s
        self._capacity = capacity
        self._kinds = [resource.kind for resource in kinds.watched(kueue=kueue)]
        self._rounds_behind = 0
        self._last_round = time.monotonic()

    async def try_lists(self) -> None:
        """Request one object of each kind that a leader lists. Raise what the API server refuses."""
        of_jobs = [(kind, namespace) for kind in self._kinds for namespace in self._namespaces]
        of_nodes = [(kind, None) for kind in SELECTORS] if self._capacity else []
        for kind, namespace in dict.fromkeys((*of_jobs, *of_nodes)):
            await self._api.try_list(kind, namespace)

    async def fill(self) -> None:
        """Put everything that exists into the store, so that no plan creates what is already there."""
        for kind in self._kinds:
            listed, _ = await self._list(kind)
            for body in listed:
                self._store.put(kind, body)
        self._last_round = time.monotonic()

    async def run(self) -> None:
        """Compare until cancelled; soon at first, for what vanished between `fill` and the watches' own lists."""
        wait_s = _FIRST_COMPARISON_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = _INTERVAL_S
            try:
                await self.round()
            except FAILURES as error:  # the probe fails if this lasts
                logger.warning("cannot compare the watches with lists: %s", error)

    async def round(self) -> None:
        """Compare once."""
        missed = 0
        for kind in self._kinds:
            missed += await self._compare(kind)
        if self._capacity:
            jobs = (job["metadata"] for job in self._store.all_of(names.KIND))
            self._capacity.retain_jobs({Key(job["namespace"], job["name"]) for job in jobs})
        self._rounds_behind = self._rounds_behind + 1 if missed else 0
        self._last_round = time.monotonic()

    def problem(self) -> str | None:
        """Return why the controller should be restarted; None while its watches deliver."""
        silent_s = self.age_s()
        if silent_s > 5 * _INTERVAL_S:
            return f"no successful list for {silent_s:.0f} s"
        if self._rounds_behind >= _BEHIND_LIMIT:
            return f"the watches missed changes in {self._rounds_behind} rounds in a row"
        return None

    def age_s(self) -> float:
        """Return the seconds since the last comparison."""
        return time.monotonic() - self._last_round

    async def _compare(self, kind: str) -> int:
        """Return how many changes of a kind the watch missed."""
        listed, version = await self._list(kind)
        if not self._store.behind(kind, listed) and not self._store.vanished(kind, listed, version):
            return 0
        await asyncio.sleep(self._grace_s)  # a change that is on its way was not missed
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
        """Return the objects of a kind in all namespaces, and the oldest resource version of the lists."""
        answers = [await self._api.list(kind, space, labelled=kind != names.KIND) for space in self._namespaces]
        items: list[Object] = [item for answer in answers for item in answer["items"]]
        return items, min(int(answer["metadata"]["resourceVersion"]) for answer in answers)


class ClusterWatch:
    """Watches that report all nodes, and the bound pods of all namespaces, to the account of the nodes."""

    def __init__(self, api: Api, capacity: Capacity) -> None:
        self._api = api
        self._capacity = capacity
        self._versions: dict[str, str] = {}  # by kind, the resource version of the last list
        self._listed_at: dict[str, float] = {}

    async def fill(self) -> None:
        """List all nodes and bound pods, however often that takes."""
        self._listed_at = dict.fromkeys(SELECTORS, time.monotonic())
        for kind in SELECTORS:
            await self._fill(kind)

    async def run(self) -> None:
        """Follow changes until cancelled."""
        async with asyncio.TaskGroup() as watches:
            for kind in SELECTORS:
                watches.create_task(self._follow(kind))

    def problem(self) -> str | None:
        """Return why the account may be wrong; None while it is right."""
        for kind, listed_at in self._listed_at.items():
            silent_s = time.monotonic() - listed_at
            if silent_s > _UNLISTED_LIMIT_S:
                return f"no whole list of all {kinds.RESOURCES[kind].plural} for {silent_s:.0f} s"
        return None

    async def _follow(self, kind: str) -> None:
        """Follow one kind. A watch that ends or breaks starts again with a list."""
        while True:
            version, fields = self._versions[kind], SELECTORS[kind]
            try:
                async for event in self._api.watch(kind, version, ends_after_s=_RELIST_S, fields=fields):
                    keep = self._capacity.remove if event["type"] == "DELETED" else self._capacity.put
                    keep(kind, event["object"])
            except FAILURES as error:
                logger.warning("the watch on all %s starts again: %s", kinds.RESOURCES[kind].plural, error)
            await asyncio.sleep(_RETRY_S)  # also after a good end: one that always ends at once must not become a storm
            await self._fill(kind)

    async def _fill(self, kind: str) -> None:
        while True:
            try:
                return await self._list(kind)
            except FAILURES as error:
                logger.warning("cannot list all %s: %s", kinds.RESOURCES[kind].plural, error)
                await asyncio.sleep(_RETRY_S)

    async def _list(self, kind: str) -> None:
        version, present = "", set()
        async for page in self._api.pages(kind, None, labels=None, fields=SELECTORS[kind]):
            version = version or page["metadata"]["resourceVersion"]
            for body in page["items"]:
                self._capacity.put(kind, body)
                present.add(body["metadata"]["uid"])
        self._capacity.retain(kind, present)
        self._versions[kind], self._listed_at[kind] = version, time.monotonic()
