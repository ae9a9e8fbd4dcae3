"""Objects that no watch shows: read by name and remembered for a while, so that a steady job costs few requests."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from stage2_controller.cluster.store import slim
from stage2_controller.job.observed import Object

_READ_AGAIN = timedelta(minutes=2)


class Getter(Protocol):
    """An API that reads one object; `stage2_controller.cluster.api_server.Api` is one."""

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None."""
        ...


class NamedObjects:
    """The objects that were asked for, and that there is none of a name, as they were at most two minutes ago."""

    def __init__(self, api: Getter, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._clock = clock
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
        self._kept[kind, namespace, name] = self._clock() + _READ_AGAIN, kept
        return kept

    def forget(self, kind: str, namespace: str | None, name: str) -> None:
        """Read the object anew when it is asked for next."""
        self._kept.pop((kind, namespace, name), None)


class PriorityClasses:
    """The PriorityClasses that jobs name. One never changes: it is read until it is there, then kept."""

    def __init__(self, api: Getter) -> None:
        self._api = api
        self._known: dict[str, Object] = {}

    async def get(self, name: str | None) -> Object | None:
        """Return the PriorityClass, or None if there is none or the job names none."""
        if name and name not in self._known:
            found = await self._api.get("PriorityClass", None, name)
            if found is not None:
                self._known[name] = found
        return self._known.get(name) if name else None
