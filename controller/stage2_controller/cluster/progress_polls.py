"""Learners are asked for their progress beside the passes: one that does not answer keeps no other job waiting."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from stage2_api.pod.report import LearnerReport
from stage2_controller.observed import Object, running
from stage2_controller.spec import names
from stage2_controller.spec.names import Key

logger = logging.getLogger(__name__)

_AT_ONCE = 32  # learners that are asked at the same time


class Reader(Protocol):
    """A client that asks one learner; `stage2_controller.cluster.progress_reader.ProgressReader` is one."""

    async def read(self, pod: Object | None, secret: Object | None) -> LearnerReport | None:
        """Return the learner's report; None while it does not run, or does not answer in time."""
        ...

    async def close(self) -> None:
        """End all connections."""
        ...


@dataclass(frozen=True)
class _LastReport:
    pod: str  # its uid: what an earlier pod said is no report of this one
    report: LearnerReport | None
    at: float


class ProgressPolls:
    """The last report of every running learner, no older than about `interval_s` when a pass asks as often.

    `told` is called with the key of a job whose learner says something new.
    """

    def __init__(
        self,
        reader: Reader,
        told: Callable[[Key], None],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = reader
        self._told = told
        self._fresh_s = interval_s / 2
        self._clock = clock
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._kept: dict[Key, _LastReport] = {}
        self._asking: dict[Key, asyncio.Task[None]] = {}

    def latest(self, key: Key, pod: Object | None, secret: Object | None) -> LearnerReport | None:
        """Return what the learner in this pod said last; ask it anew, in the background, if that was a while ago."""
        if pod is None or secret is None or not running(pod, names.ROLE_LEARNER):
            self.forget(key)
            return None
        uid, kept = pod["metadata"]["uid"], self._kept.get(key)
        known = kept if kept and kept.pod == uid else None
        if key not in self._asking and (known is None or self._clock() - known.at >= self._fresh_s):
            self._asking[key] = asyncio.create_task(self._ask(key, uid, pod, secret))
        return known.report if known else None

    def forget(self, key: Key) -> None:
        """Drop the report of a job that has no running learner any more."""
        self._kept.pop(key, None)
        if task := self._asking.pop(key, None):
            task.cancel()

    async def close(self) -> None:
        """Ask nobody any more."""
        for key in list(self._asking):
            self.forget(key)
        await self._reader.close()

    async def _ask(self, key: Key, uid: str, pod: Object, secret: Object) -> None:
        try:
            async with self._gate:
                report = await self._reader.read(pod, secret)
        except Exception:  # a bug in reading one report must not look as if the learner were asked for ever
            logger.exception("%s: its learner's report cannot be read", key)
            report = None
        before = self._kept.get(key)
        self._kept[key] = _LastReport(uid, report, self._clock())
        self._asking.pop(key, None)
        if report != (before.report if before and before.pod == uid else None):
            self._told(key)
