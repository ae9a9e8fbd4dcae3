"""Nodes and pods of all namespaces are counted, also when the watch on them breaks."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest

from stage2_controller.cluster import watches
from stage2_controller.cluster.watches import ClusterWatch
from stage2_controller.place.capacity import Capacity
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_capacity import free

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


async def test_an_account_that_no_list_has_confirmed_for_ten_minutes_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(watches=[])
    watcher = ClusterWatch(cast("Any", server), n.capacity())
    now = 1000.0
    monkeypatch.setattr(watches.time, "monotonic", lambda: now)
    await watcher.fill()
    now = 1599.0
    assert watcher.problem() is None
    now = 1601.0
    assert watcher.problem() == "no whole list of all nodes for 601 s"
