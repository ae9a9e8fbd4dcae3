"""Objects that no watch shows: read by name and remembered for a while, so that a steady job costs few requests."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any, Protocol
from weakref import WeakValueDictionary

from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.observed import Object
from stage2_controller.place import pod_defaults
from stage2_controller.place.pod_defaults import PodDefaults
from stage2_controller.store import slim

logger = logging.getLogger(__name__)

_READ_AGAIN = timedelta(minutes=2)


class Getter(Protocol):
    """An API that reads one object; `stage2_controller.cluster.api_server.Api` is one."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None."""
        ...


class NamedObjects:
    """The objects that were asked for, and that there is none of a name, as they were at most `kept_for` ago."""

    def __init__(self, api: Getter, clock: Callable[[], datetime], *, kept_for: timedelta = _READ_AGAIN) -> None:
        self._api = api
        self._clock = clock
        self._kept_for = kept_for
        self._kept: dict[tuple[str, str | None, str], tuple[datetime, Object | None]] = {}  # with the end of its use

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None; read it anew if that was done too long ago."""
        kept = self._kept.get((kind, namespace, name))
        if kept and kept[0] > self._clock():
            return kept[1]
        return self.put(kind, namespace, name, await self._api.get(kind, namespace, name))

    def put(self, kind: str, namespace: str | None, name: str, body: Object | None) -> Object | None:
        """Remember the object as it is now, and return what is kept of it."""
        kept = slim(kind, body) if body is not None else None
        self._kept[kind, namespace, name] = self._clock() + self._kept_for, kept
        return kept

    def forget(self, kind: str, namespace: str | None, name: str) -> None:
        """Read the object anew when it is asked for next."""
        self._kept.pop((kind, namespace, name), None)


class ListingGetter(Getter, Protocol):
    """An API that also lists; `stage2_controller.cluster.api_server.Api` is one."""

    async def list(self, kind: str, namespace: str | None, *, labelled: bool) -> Object:
        """Return the list of a kind in one namespace or in all."""
        ...


class DefaultsOfPods:
    """What the API server adds to jobs' pods, as it was at most two minutes ago.

    What the controller may not read counts as nothing: its rights may come later than itself.
    """

    def __init__(self, api: ListingGetter, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._named = NamedObjects(self, clock)
        self._clock = clock
        self._read: dict[tuple[str, str | None], tuple[datetime, Any]] = {}  # with the end of its use
        self._refused: set[str] = set()
        # Passes at one time ask once, and none waits for what another namespace has.
        self._reading: WeakValueDictionary[tuple[str, str | None], asyncio.Lock] = WeakValueDictionary()

    async def of(self, namespace: str, spec: Mapping[str, Any]) -> PodDefaults:
        """Return what is added to the pods of a job of this spec."""
        return PodDefaults(
            requests=await self._made_of("LimitRange", namespace, pod_defaults.default_requests),
            runtime_classes=await self._those("RuntimeClass", pod_defaults.runtime_classes(spec)),
            priority_classes=await self._those("PriorityClass", pod_defaults.priority_classes(spec)),
            default_class=await self._made_of("PriorityClass", None, pod_defaults.default_of),
        )

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return an object as it is now, or None."""
        return await self._allowed(kind, self._api.get(kind, namespace, name))

    async def _those(self, kind: str, names: Set[str]) -> dict[str, Object]:
        found = {}
        for name in names:
            if (there := await self._named.get(kind, None, name)) is not None:
                found[name] = there
            else:  # no pod can be made without it: it counts as soon as it is there
                self._named.forget(kind, None, name)
        return found

    async def _made_of(self, kind: str, namespace: str | None, make: Callable[[Sequence[Object]], Any]) -> Any:
        async with self._reading.setdefault((kind, namespace), asyncio.Lock()):
            now = self._clock()
            kept = self._read.get((kind, namespace))
            if kept is None or kept[0] <= now:
                found = await self._allowed(kind, self._api.list(kind, namespace, labelled=False))
                self._read = {key: one for key, one in self._read.items() if one[0] > now}
                kept = self._read[kind, namespace] = now + _READ_AGAIN, make(found["items"] if found else ())
            return kept[1]

    async def _allowed(self, kind: str, asked: Awaitable[Object | None]) -> Object | None:
        try:
            return await asked
        except ApiRefused as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            if kind not in self._refused:
                self._refused.add(kind)
                logger.warning("%s: what it adds to pods counts for no job's place until the controller may", error)
            return None
