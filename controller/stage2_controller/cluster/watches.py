"""Watches beside kopf's on jobs: they keep the store of children, and the account of all nodes, true.

Each begins with a list in pages, follows the changes from there, and begins again after four minutes. So no change
stays unknown for longer, although a watch may go silent while the process looks healthy. The jobs are listed here as
well, for what kopf's watch missed: every four minutes, and once a connection broke.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.job import kinds
from stage2_controller.state.observed import Object

logger = logging.getLogger(__name__)

FAILURES = (ApiRefused, aiohttp.ClientError, TimeoutError)
"""What a request raises that the API server does not answer, or refuses."""
_RELIST_S = 240
_FIRST_RELIST_S = 5.0  # for jobs that went between our first list and kopf's
_RETRY_S = 2.0
_UNLISTED_LIMIT_S = 600.0


class WentBack(Exception):
    """The API server's state is older than before, as after a restore from a backup; the text has the evidence."""


@dataclass
class Feed:
    """A kind to follow, in one namespace or in all, and what takes in its changes."""

    kind: str
    observe: Callable[[str, Object], None]  # takes in an event, as a watch delivers it
    vanished: Callable[[str, str | None, Container[str], int], Iterable[Object]]  # what a list no longer has
    knows: Callable[[str, Object], bool] = lambda kind, body: False  # whether this state, or a newer one, is known
    known_version: Callable[[str, Object], int | None] = lambda kind, body: None  # of the object of that name
    namespace: str | None = None
    labels: str | None = None
    fields: str | None = None
    by_kopf: bool = False  # kopf watches it
    version: str = ""  # of the last list, or of the last change since
    listed_at: float = field(default_factory=time.monotonic)
    pause_s: float = _FIRST_RELIST_S  # of a kind that kopf watches
    suspect: asyncio.Event = field(default_factory=asyncio.Event)  # kopf's watch may have missed something


class Watches:
    """Follows every feed. What a change means is decided by whoever takes it in."""

    def __init__(self, api: Api, feeds: Sequence[Feed]) -> None:
        self._api = api
        self._feeds = feeds

    async def try_lists(self) -> None:
        """Request one object of each kind. Raise what the API server refuses."""
        for kind, namespace in dict.fromkeys((feed.kind, feed.namespace) for feed in self._feeds):
            await self._api.try_list(kind, namespace)

    async def fill(self) -> None:
        """List everything, so that no plan creates what is already there. Raise what the API server refuses."""
        for feed in self._feeds:
            await self._list(feed)

    async def run(self) -> None:
        """Follow changes until cancelled."""
        async with asyncio.TaskGroup() as watches:
            for feed in self._feeds:
                watches.create_task(self._follow(feed))

    def age_s(self) -> float:
        """Return the seconds since the oldest of the last lists."""
        return time.monotonic() - min(feed.listed_at for feed in self._feeds)

    def problem(self) -> str | None:
        """Return why the controller should be restarted; None while its lists are young."""
        silent = [feed.kind for feed in self._feeds if time.monotonic() - feed.listed_at > _UNLISTED_LIMIT_S]
        return f"no whole list of all {kinds.RESOURCES[silent[0]].plural} for {self.age_s():.0f} s" if silent else None

    async def _follow(self, feed: Feed) -> None:
        while True:
            await self._succeeds(self._watch, feed)
            # A watch is silent on a server that was restored and has not reached its version: a list comes before it.
            while not await self._succeeds(self._list, feed):
                await asyncio.sleep(_RETRY_S)
            await asyncio.sleep(_RETRY_S)  # also after a good end: one that always ends at once must not become a storm

    async def _succeeds(self, step: Callable[[Feed], Awaitable[None]], feed: Feed) -> bool:
        """Take a step; return False where the API server fails it."""
        try:
            await step(feed)
        except FAILURES as error:  # `problem` reports it if it lasts
            logger.warning("restarting the watch on %s: %s", kinds.RESOURCES[feed.kind].plural, error)
            self._suspect_kopfs(feed, error)
            return False
        return True

    async def _watch(self, feed: Feed) -> None:
        if feed.by_kopf:
            with suppress(TimeoutError):
                await asyncio.wait_for(feed.suspect.wait(), feed.pause_s)
            feed.suspect.clear()
            feed.pause_s = _RELIST_S
            return
        where = {"namespace": feed.namespace, "labels": feed.labels, "fields": feed.fields}
        async for event in self._api.watch(feed.kind, feed.version, ends_after_s=_RELIST_S, **where):
            feed.observe(feed.kind, event)
            feed.version = event["object"]["metadata"]["resourceVersion"]

    def _suspect_kopfs(self, feed: Feed, error: Exception) -> None:
        """Request a list of what kopf watches: where our connection broke, its own did too.

        Kopf lists again as well, but no list of its own shows a job that was deleted meanwhile.
        """
        if feed.by_kopf or not isinstance(error, ApiRefused):
            for one in self._feeds:
                one.suspect.set()

    async def _list(self, feed: Feed) -> None:
        version, present = "", set()
        async for page in self._api.pages(feed.kind, feed.namespace, labels=feed.labels, fields=feed.fields):
            version = version or page["metadata"]["resourceVersion"]
            _check_is_later(feed, version, page["items"])
            for body in page["items"]:
                present.add(body["metadata"]["uid"])
                if not feed.knows(feed.kind, body):
                    feed.observe(feed.kind, {"type": "MODIFIED", "object": body})
        for body in list(feed.vanished(feed.kind, feed.namespace, present, int(version))):
            feed.observe(feed.kind, {"type": "DELETED", "object": body})
        feed.version, feed.listed_at = version, time.monotonic()


def _check_is_later(feed: Feed, version: str, items: Iterable[Object]) -> None:
    """Raise WentBack if a list is older than what was seen before it, or has an object in a state older than the known.

    Without a restore, a list has each object as it is, and versions only grow.
    """
    resource = kinds.RESOURCES[feed.kind]
    if feed.version and int(version) < int(feed.version):
        raise WentBack(f"{resource.plural}: version {version} after {feed.version}")
    for body in items:
        known, metadata = feed.known_version(feed.kind, body), body["metadata"]
        if known is not None and int(metadata["resourceVersion"]) < known <= int(version):
            what = f"{resource.kind.lower()} {metadata['name']}"
            raise WentBack(f"{what}: version {metadata['resourceVersion']} after {known}")
