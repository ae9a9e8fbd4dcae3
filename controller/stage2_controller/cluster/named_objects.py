"""Objects that no watch shows: read by name and remembered for a while, so that a steady job costs few requests."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

from stage2_controller.observed import Object
from stage2_controller.store import slim

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
