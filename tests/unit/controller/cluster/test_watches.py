"""Watches that break or go silent lose nothing: lists mend what no watch delivered, in the store and for the nodes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from stage2_controller.cluster import watches
from stage2_controller.cluster.watches import Feed, Watches, WentBack
from stage2_controller.place.capacity import Capacity
from stage2_controller.state.store import Store
from tests.unit.controller import nodes as n
from tests.unit.controller.cluster.test_store import seen, version
from tests.unit.controller.place.test_capacity import free

PATIENCE_S = 60

Object = dict[str, Any]


class Server:
    """An API server that holds objects by kind, and tells one script of events for each watch; then it hangs."""

    def __init__(self, *scripts: list[Object | Exception], **objects: list[Object]) -> None:
        self.objects = objects
        self.scripts = list(scripts)
        self.asked: list[Any] = []
        self.version = "100"  # of every list
        self.idle = asyncio.Event()

    async def try_list(self, kind: str, namespace: str | None) -> None:
        self.asked.append((kind, namespace))

    async def pages(self, kind: str, namespace: str | None, **_: Any) -> AsyncIterator[Object]:
        for body in self.objects.get(kind) or [None]:
            yield {"items": [body] if body else [], "metadata": {"resourceVersion": self.version}}

    async def watch(self, kind: str, since: str, **_: Any) -> AsyncIterator[Object]:
        self.asked.append(since)
        for event in self.scripts.pop(0) if self.scripts else []:
            if isinstance(event, Exception):
                raise event
            yield event
        if not self.scripts:
            self.idle.set()
            await asyncio.Event().wait()


def of_nodes(account: Capacity, kind: str = "Pod", **more: Any) -> Feed:
    return Feed(kind, account.observe, account.vanished, **more)


def of_store(store: Store, reported: list[str], **more: Any) -> Feed:
    """The children of jobs. Notes each change that it takes in."""

    def observe(kind: str, event: Any) -> None:
        reported.append(event["object"]["metadata"]["name"])
        (store.remove if event["type"] == "DELETED" else store.put)(kind, event["object"])

    return Feed("Pod", observe, store.vanished, knows=store.knows, known_version=store.known_version, **more)


async def followed(server: Any, *feeds: Feed) -> None:
    """Follow the server until it has nothing more to tell."""
    watcher = Watches(server, feeds)
    await watcher.fill()
    running = asyncio.create_task(watcher.run())
    await asyncio.wait_for(server.idle.wait(), PATIENCE_S)
    running.cancel()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_RETRY_S", 0.0)


async def test_each_list_of_leader_is_tried_once_before_election() -> None:
    server: Any = Server()
    store, account = Store(), n.capacity()
    feeds = [of_store(store, [], namespace=space) for space in ("a", "b")]
    await Watches(server, [*feeds, of_nodes(account), of_nodes(account, fields="x")]).try_lists()
    assert server.asked == [("Pod", "a"), ("Pod", "b"), ("Pod", None)]


async def test_lists_apply_only_new_and_deleted_objects() -> None:
    server: Any = Server(Pod=[seen("Pod", "same", 5), seen("Pod", "newer", 7)])
    store, reported = Store(), list[str]()
    for body in (seen("Pod", "same", 5), seen("Pod", "newer", 6), seen("Pod", "gone", 4, uid="of-gone")):
        store.put("Pod", body)
    await Watches(server, [of_store(store, reported)]).fill()
    assert reported == ["newer", "gone"]
    assert [version(store, "Pod", name) for name in ("same", "newer", "gone")] == ["5", "7", None]


async def test_listed_and_watched_pods_are_counted() -> None:
    account = n.capacity(n.node(gpus=8))
    first, second = n.foreign(gpus=1), n.foreign(gpus=2)
    gone = {**first, "metadata": {**first["metadata"], "resourceVersion": "101"}}
    server = Server([{"type": "ADDED", "object": second}, {"type": "DELETED", "object": gone}], Pod=[first])
    await followed(server, of_nodes(account))
    assert free(account) == 6


@pytest.mark.parametrize("script", [[aiohttp.ClientError("gone")], []], ids=["breaks", "ends"])
async def test_broken_or_ended_watch_restarts_with_list(script: list[Any]) -> None:
    account = n.capacity(n.node(gpus=8))
    server = Server(script, [])
    feed = of_nodes(account)
    await Watches(cast_server(server), [feed]).fill()
    server.objects["Pod"] = [n.foreign(gpus=4)]
    await followed(server, feed)
    assert free(account) == 4
    assert server.asked == ["100", "100"]


def cast_server(server: Server) -> Any:
    return server


async def test_objects_watched_by_kopf_are_only_listed() -> None:
    server: Any = Server(Pod=[seen("Pod", "missed", 7)])
    store, reported = Store(), list[str]()
    feed = of_store(store, reported, by_kopf=True, pause_s=0.001)
    running = asyncio.create_task(Watches(server, [feed]).run())
    while not reported:
        await asyncio.sleep(0.001)
    running.cancel()
    assert (reported, server.asked) == (["missed"], [])


async def test_broken_watch_triggers_list_of_objects_watched_by_kopf() -> None:
    """Kopf's watch broke as well. A job that was deleted meanwhile is in no list of kopf's, nor in its watch."""
    server: Any = Server([aiohttp.ClientError("gone")], [], Pod=[seen("Pod", "missed", 7)])
    store, reported = Store(), list[str]()
    feed = of_store(store, reported, by_kopf=True, pause_s=60.0)
    services = Feed("Service", lambda kind, event: None, store.vanished)
    running = asyncio.create_task(Watches(server, [services, feed]).run())
    async with asyncio.timeout(PATIENCE_S):
        while not reported:
            await asyncio.sleep(0.001)
    running.cancel()
    assert reported == ["missed"]


async def test_lists_failing_for_ten_minutes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(watches.time, "monotonic", lambda: now)
    watcher = Watches(cast_server(Server()), [of_nodes(n.capacity(), listed_at=now)])
    await watcher.fill()
    now = 1599.0
    assert (watcher.problem(), watcher.age_s()) == (None, 599.0)
    now = 1601.0
    assert watcher.problem() == "no whole list of all pods for 601 s"


async def test_list_older_than_last_one_means_restored_backup() -> None:
    """etcd was restored: everything that is known is of a world that never was."""
    server: Any = Server(Pod=[seen("Pod", "p", 5)])
    watcher = Watches(server, [of_store(Store(), [])])
    await watcher.fill()
    server.version = "99"
    with pytest.raises(WentBack, match="pods: version 99 after 100"):
        await watcher.fill()


@pytest.mark.parametrize("uid", ["1", "of-the-one-before"])
async def test_object_older_in_new_list_means_restored_backup(uid: str) -> None:
    """Versions were raised as etcd was restored, so that no list seems older."""
    server: Any = Server(Pod=[seen("Pod", "p", 5, uid=uid)])
    store = Store()
    store.put("Pod", seen("Pod", "p", 50))
    with pytest.raises(WentBack, match="pod p: version 5 after 50"):
        await Watches(server, [of_store(store, [])]).fill()


async def test_change_during_list_does_not_mean_restored_backup() -> None:
    server: Any = Server(Pod=[seen("Pod", "p", 5)])
    store, reported = Store(), list[str]()
    store.put("Pod", seen("Pod", "p", 101))
    await Watches(server, [of_store(store, reported)]).fill()
    assert (version(store, "Pod", "p"), reported) == ("101", [])


async def test_restored_api_server_ends_watches() -> None:
    """The watch from a version of the future is refused, and the list that follows shows why."""
    server: Any = Server([aiohttp.ClientError("too large resource version")], Pod=[seen("Pod", "p", 5)])
    watcher = Watches(server, [of_store(Store(), [])])
    await watcher.fill()
    server.version = "7"
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(watcher.run(), PATIENCE_S)
    assert raised.group_contains(WentBack)


async def test_api_server_restored_during_outage_ends_watches() -> None:
    """No watch begins before a list has succeeded: one from a version of the future would be silent for minutes."""

    class Away(Server):
        refusals = 0

        async def pages(self, kind: str, namespace: str | None, **options: Any) -> AsyncIterator[Object]:
            if self.refusals:
                self.refusals -= 1
                raise aiohttp.ClientError("connection refused")
            async for page in super().pages(kind, namespace, **options):
                yield page

    server: Any = Away([aiohttp.ClientError("it is away")], Pod=[seen("Pod", "p", 5)])
    watcher = Watches(server, [of_store(Store(), [])])
    await watcher.fill()
    server.version, server.refusals = "7", 3
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(watcher.run(), PATIENCE_S)
    assert raised.group_contains(WentBack)
    assert server.asked == ["100"], "the watch that broke"


async def test_list_older_than_watch_event_means_restored_backup() -> None:
    event = {"type": "ADDED", "object": seen("Pod", "q", 150, uid="2")}
    server: Any = Server([event, aiohttp.ClientError("it is restored")])
    watcher = Watches(server, [of_store(Store(), [])])
    await watcher.fill()
    server.version = "120"
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(watcher.run(), PATIENCE_S)
    assert raised.group_contains(WentBack, match="pods: version 120 after 150")
