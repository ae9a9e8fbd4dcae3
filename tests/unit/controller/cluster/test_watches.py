"""Watches that break or go deaf are noticed: lists mend what no watch delivered, in the store and for the nodes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest

from stage2_controller.cluster import watches
from stage2_controller.cluster.watches import ClusterWatch, Freshness
from stage2_controller.place.capacity import Capacity
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.store import Store
from tests.unit.controller import nodes as n
from tests.unit.controller.cluster.test_store import KEY, seen, version
from tests.unit.controller.place.test_capacity import free

KINDS = [resource.kind for resource in kinds.watched(kueue=False)]


class Lists:
    """The lists of an API server that holds `objects`."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {kind: [] for kind in (*KINDS, "Node")}
        self.tried: set[tuple[str, str | None]] = set()

    async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> dict[str, Any]:
        return {"items": self.objects[kind], "metadata": {"resourceVersion": "100"}}

    async def try_list(self, kind: str, namespace: str | None) -> None:
        self.tried.add((kind, namespace))


class Stage:
    """A store, the lists beside it, and the keys that were put on the queue."""

    def __init__(self) -> None:
        self.lists = Lists()
        self.store = Store()
        self.asked: list[Key] = []
        self.account = n.capacity()
        self.freshness = Freshness(self.lists, self.store, self.asked.append, grace_s=0, capacity=self.account)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize("namespaces", [(), ("a", "b")])
async def test_whoever_asks_for_the_lease_has_tried_each_list_that_a_leader_makes(namespaces: tuple[str, ...]) -> None:
    """The pods of all namespaces too, which take room on nodes, whatever namespaces are served."""
    lists = Lists()
    await Freshness(lists, Store(), lambda _: None, namespaces=namespaces, capacity=n.capacity()).try_lists()
    served = {(kind, namespace) for kind in KINDS for namespace in namespaces or (None,)}
    assert lists.tried == served | {("Node", None), ("Pod", None)}


async def test_it_fills_the_store_before_the_first_pass(stage: Stage) -> None:
    stage.lists.objects["Job"] = [seen("Job", "j", 5)]
    await stage.freshness.fill()
    assert version(stage.store, "Job", "j") == "5"


async def test_a_change_that_no_watch_delivered_is_mended_and_asks_for_a_pass(stage: Stage) -> None:
    stage.store.put("Job", seen("Job", "j", 5))
    stage.store.put("Pod", seen("Pod", "gone", 6))
    stage.lists.objects["Job"] = [seen("Job", "j", 7)]
    await stage.freshness.round()
    assert version(stage.store, "Job", "j") == "7"
    assert version(stage.store, "Pod", "gone") is None
    assert stage.asked == [KEY, KEY]


async def test_watches_that_deliver_are_fresh(stage: Stage) -> None:
    for count in range(5):
        body = seen(names.KIND, "job-3v1", count)
        stage.store.put(names.KIND, body)
        stage.lists.objects[names.KIND] = [body]
        await stage.freshness.round()
    assert stage.freshness.problem() is None
    assert stage.asked == []


async def test_watches_that_miss_changes_again_and_again_are_deaf(stage: Stage) -> None:
    for count in range(1, 4):
        assert stage.freshness.problem() is None
        stage.lists.objects[names.KIND] = [seen(names.KIND, "job-3v1", count)]
        await stage.freshness.round()
    assert "missed changes in 3 rounds" in str(stage.freshness.problem())


async def test_room_that_is_promised_to_jobs_that_do_not_exist_is_free_after_a_round(stage: Stage) -> None:
    there = seen(names.KIND, "job-3v1", 1)
    stage.store.put(names.KIND, there)
    stage.lists.objects |= {names.KIND: [there], "Node": [n.node(), n.node("b")]}
    stage.account.promise(KEY, n.FOUR, "node-a")
    stage.account.promise(n.OTHER, n.FOUR, "b")
    await stage.freshness.round()
    assert (stage.account.snapshot(KEY).promised, stage.account.snapshot(n.OTHER).promised) == ("node-a", None)


Object = dict[str, Any]


class Server:
    """An API server that holds pods, and tells one script of events for each watch; then it hangs."""

    def __init__(self, *pods: Object, watches: list[list[Object | Exception]]) -> None:
        self.pods, self.nodes = list(pods), [n.node(gpus=8)]
        self.scripts = watches
        self.asked: list[str] = []
        self.idle = asyncio.Event()

    async def pages(
        self, kind: str, namespace: str | None, *, labels: str | None, fields: str | None
    ) -> AsyncIterator[Object]:
        assert (namespace, labels, fields) == (None, None, watches.SELECTORS[kind])
        metadata = {"resourceVersion": "100"}
        for body in (self.pods if kind == "Pod" else self.nodes) or [None]:
            yield {"items": [body] if body else [], "metadata": metadata}

    async def watch(self, kind: str, version: str, *, ends_after_s: int, fields: str) -> AsyncIterator[Object]:
        if kind == "Node":
            await asyncio.Event().wait()
        self.asked.append(version)
        for event in self.scripts.pop(0) if self.scripts else []:
            if isinstance(event, Exception):
                raise event
            yield event
        self.idle.set()
        await asyncio.Event().wait()


async def followed(server: Server, capacity: Capacity) -> None:
    """Follows the server until it has nothing more to tell."""
    watcher = ClusterWatch(cast("Any", server), capacity)
    await watcher.fill()
    running = asyncio.create_task(watcher.run())
    await asyncio.wait_for(server.idle.wait(), 5)
    running.cancel()


async def test_what_exists_and_what_comes_and_goes_is_counted() -> None:
    account = n.capacity()
    first, second = n.foreign(gpus=1), n.foreign(gpus=2)
    gone = {**first, "metadata": {**first["metadata"], "resourceVersion": "101"}}
    server = Server(first, watches=[[{"type": "ADDED", "object": second}, {"type": "DELETED", "object": gone}]])
    await ClusterWatch(cast("Any", server), account).fill()
    assert free(account) == 7
    await followed(server, account)
    assert free(account) == 6


async def test_a_watch_that_breaks_begins_again_with_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_RETRY_S", 0.0)
    account = n.capacity()
    unseen = n.foreign(gpus=4)
    server = Server(watches=[[aiohttp.ClientError("gone")]])
    watcher = ClusterWatch(cast("Any", server), account)
    await watcher.fill()
    server.pods = [unseen]
    await followed(server, account)
    assert free(account) == 4
    assert server.asked == ["100", "100"]


class Away(Server):
    """An API server that lists no pods."""

    async def pages(self, *_: Any, **__: Any) -> AsyncIterator[Object]:
        raise aiohttp.ClientError("away")
        yield  # makes it a generator


async def test_first_lists_that_are_refused_for_ten_minutes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = ClusterWatch(cast("Any", Away(watches=[])), n.capacity())
    filling = asyncio.create_task(watcher.fill())
    await asyncio.sleep(0)
    assert watcher.problem() is None
    monkeypatch.setattr(watches, "_UNLISTED_LIMIT_S", 0.0)
    assert "no whole list of all nodes" in str(watcher.problem())
    filling.cancel()


async def test_an_account_without_a_list_for_ten_minutes_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(watches=[])
    watcher = ClusterWatch(cast("Any", server), n.capacity())
    now = 1000.0
    monkeypatch.setattr(watches.time, "monotonic", lambda: now)
    await watcher.fill()
    now = 1599.0
    assert watcher.problem() is None
    now = 1601.0
    assert watcher.problem() == "no whole list of all nodes for 601 s"
