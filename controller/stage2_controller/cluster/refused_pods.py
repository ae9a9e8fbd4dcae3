"""Why the API server takes no pod of a learner's Job: only events of the Job controller say it.

Nobody watches events: there are many, of everything. They are read where such a pod has been missing for a while.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

import aiohttp

from stage2_controller import conditions
from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.observed import Object, Observed
from stage2_controller.place import binding
from stage2_controller.spec.names import Key

logger = logging.getLogger(__name__)

# A filter by fields has the API server read all events of the namespace; what refuses one job may refuse a thousand.
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(minutes=1), timedelta(minutes=16)
_REASON = "FailedCreate"


class EventsReader(Protocol):
    """An API that reads events; `stage2_controller.cluster.api_server.Api` is one."""

    async def events_of(self, namespace: str, uid: str, reason: str) -> Sequence[Object]:
        """Return events of this reason about the object with this uid."""
        ...


class RefusedPods:
    """The sentences of such events, each as it was a minute ago, and of a Job without a pod for long up to sixteen."""

    def __init__(self, api: EventsReader, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._clock = clock
        self._kept: dict[Key, tuple[datetime, timedelta, str | None]] = {}  # with the end and the length of its use

    async def of_learner(self, key: Key, seen: Observed, status: Mapping[str, Any]) -> str | None:
        """Return why the learner's Job has no pod; None where that is not known, or none is missing for long.

        status: the one that the last pass wrote.
        """
        now, since = self._clock(), binding.learner_unmade_since(seen, status)
        if seen.learner is None or since is None or conditions.seconds_left(since, binding.UNMADE_S, now) > 0:
            self.forget(key)
            return None
        kept = self._kept.get(key)
        if kept is None or kept[0] <= now:
            told = await self._newest(key.namespace, seen.learner["metadata"]["uid"], since)
            pause = min(2 * kept[1], _LONGEST_PAUSE) if kept else _FIRST_PAUSE
            kept = self._kept[key] = now + pause, pause, told
        return kept[2]

    def forget(self, key: Key) -> None:
        """Drop what was read of a job."""
        self._kept.pop(key, None)

    async def _newest(self, namespace: str, uid: str, since: datetime) -> str | None:
        """Return the newest sentence since then: an older one may be of what was mended before a pod that is gone."""
        try:
            found = await self._api.events_of(namespace, uid, _REASON)
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:  # the sentence is a help, and no more
            logger.warning("%s: why pods are not made is not told", str(error) or type(error).__name__)
            return None
        told = [(_at(event), str(event["message"])) for event in found if event.get("message")]
        return max((one for one in told if one[0] >= since), default=(since, None))[1]


def _at(event: Object) -> datetime:
    """Return when the event was told last; of its times some are null, according to who writes it."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(conditions.instant(time) for time in (*times, event["metadata"]["creationTimestamp"]) if time)
