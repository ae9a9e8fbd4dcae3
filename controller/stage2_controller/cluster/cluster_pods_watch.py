"""The pods of every namespace that take room on nodes: bound, and not ended.

kopf would hold all of them at once, several times over. This watch lists them a page at a time, and keeps of each what
counts.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import aiohttp

from stage2_controller import store
from stage2_controller.cluster.api_server import ApiRefused, Pager
from stage2_controller.observed import Object
from stage2_controller.place.capacity import Capacity

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
