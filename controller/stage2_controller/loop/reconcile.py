"""One pass over one job: parse it, observe it, choose its place, build and apply its children, write its status.

`Reconciler._pass` has the steps in order. The decisions are pure and in `plan`, but for the condition ChildrenApplied:
only the writes show what the API server refuses.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stage2_api.errors import ConfigError
from stage2_controller.children.build import ParsedJob, is_large, parse_or_error
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.apply import ChildWriter, NameTaken
from stage2_controller.cluster.observe import Observer, child_name
from stage2_controller.cluster.progress import ProgressPolls
from stage2_controller.job import credentials, names
from stage2_controller.job.names import Key
from stage2_controller.job.settings import Settings
from stage2_controller.loop.metrics import Metrics
from stage2_controller.loop.work_queue import Broken, RetryLater
from stage2_controller.place import placement
from stage2_controller.place.capacity import Capacity, Snapshot
from stage2_controller.place.quota import Quotas
from stage2_controller.plan import outcome
from stage2_controller.plan import status as statuses
from stage2_controller.plan.page import plan
from stage2_controller.plan.result import Plan
from stage2_controller.report.explanation import events
from stage2_controller.state import conditions
from stage2_controller.state.observed import Object, Observed, terminating
from stage2_controller.state.store import Store

logger = logging.getLogger(__name__)

Revision = tuple[str, int]  # uid and generation: one spec of one job


class Reconciler:
    """The passes over jobs. The queue makes one at a time for each job."""

    def __init__(
        self,
        api: Api,
        store: Store,
        progress: ProgressPolls,
        settings: Settings,
        *,
        metrics: Metrics,
        capacity: Capacity,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._store = store
        self._progress = progress
        self._settings = settings
        self._metrics = metrics
        self._capacity = capacity
        self._clock = clock
        self.quotas = Quotas(store)
        self._parsed: dict[Key, tuple[Revision, ParsedJob | ConfigError]] = {}
        self._parser = ThreadPoolExecutor(1, "parse-jobs")  # one: more would keep the event loop from its processor
        self._logged_bugs: dict[Key, Revision] = {}  # what each was logged for
        self._placed: set[Key] = set()  # jobs of which quotas and capacity may know something
        self._observer = Observer(api, store, progress, kueue_served=settings.kueue, clock=clock)
        self._writer = ChildWriter(api, self._observer)

    async def __call__(self, key: Key) -> float | None:
        """Make one pass; return the seconds until the next one. Raise RetryLater if the API server fails."""
        result = "retry"  # also of a pass that is cancelled, since a replica lost its Lease
        try:
            with self._metrics.pass_seconds.time():
                again_after_s = await self._pass(key)
            result = "done"
        except NameTaken:  # of a child, during the writes: the next pass, at once, reports it
            result, again_after_s = "done", 0.0
        except RetryLater as reason:
            result = "error" if isinstance(reason, Broken) else "retry"
            raise
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            raise RetryLater(str(error) or type(error).__name__) from error
        except Exception:
            result = "error"
            raise
        finally:
            self._metrics.passes.labels(result).inc()
        return again_after_s

    async def _pass(self, key: Key) -> float | None:
        raw = self._store.one(names.KIND, key, key.name)
        if raw is None or terminating(raw):
            self.forget(key)
            return None
        parsed = await self._parse(key, raw)
        seen = await self._observer.observe(key, raw)
        if not self._still_exists(key, raw):  # deleted meanwhile: nobody would release room promised now
            self.forget(key)
            return None
        now = self._clock()
        made, bug = self._plan(key, raw, parsed, seen, now)
        own_place = not names.runs_as_jobset(raw)
        if own_place:  # before anything else is awaited: no other job must be promised the same room
            self._record_place(key, made)
        refusals = await self._apply(key, raw, seen, made)
        if refusals and own_place:
            self._take_back_place(key, raw)
        written = await self._write_status(key, raw, made, refusals, now)
        if made.workload_patch:
            name = child_name("Workload", key)
            await self._api.patch_status("Workload", key.namespace, name, made.workload_patch)
        await self._clean_up_if_ended(key, raw, written, made)
        if refusals:
            raise RetryLater("; ".join(refusals))
        if bug:
            raise Broken("a bug of the controller; the job's condition Accepted reports it") from bug
        return made.again_after_s

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is gone, and the room that is kept for it."""
        self._observer.forget(key)
        self._parsed.pop(key, None)
        self._logged_bugs.pop(key, None)
        self._progress.forget(key)
        if key in self._placed:
            self._placed.remove(key)
            self.quotas.record(key, None)
            self._capacity.release(key)

    def _still_exists(self, key: Key, raw: Object) -> bool:
        """Return whether the store still has this very job: the watch may have delivered its end meanwhile."""
        known = self._store.one(names.KIND, key, key.name)
        return known is not None and not terminating(known) and known["metadata"]["uid"] == raw["metadata"]["uid"]

    async def _parse(self, key: Key, raw: Object) -> ParsedJob | Exception:
        """Return the parsed job, or why it cannot be parsed; a large one is parsed in a thread.

        Each spec is parsed once, unless a bug stops it.
        """
        revision, known = _revision(raw), self._parsed.get(key)
        if known is not None and known[0] == revision:
            return known[1]
        try:
            if is_large(raw):
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._parser, parse_or_error, raw, self._settings)
            else:
                result = parse_or_error(raw, self._settings)
        except Exception as error:  # noqa: BLE001  # a bug, which the job's status reports
            return error
        self._parsed[key] = revision, result
        return result

    def _plan(
        self, key: Key, raw: Object, parsed: ParsedJob | Exception, seen: Observed, now: datetime
    ) -> tuple[Plan, Exception | None]:
        """Return the plan. If planning meets a bug, return a plan that reports it, and the bug."""
        try:
            own_place = not names.runs_as_jobset(raw)
            # What stands is left to the API server.
            if own_place and isinstance(parsed, ParsedJob) and not placement.standing(seen):
                seen = replace(seen, over_quota=self.quotas.exceeded(key, parsed.need))
            made = plan(
                raw,
                parsed,
                seen,
                settings=self._settings,
                now=now,
                new_credentials=credentials.new,
                snapshot=self._capacity.snapshot(key) if own_place else Snapshot(key, {}),
            )
        except Exception as error:  # whatever it is, the job reports it
            revision = _revision(raw)
            if self._logged_bugs.get(key) != revision:
                self._logged_bugs[key] = revision
                logger.error("%s: a bug in the controller, logged once for this spec", key, exc_info=error)
            return Plan(status=statuses.after_bug(raw, error, now), keeps_place=True), error
        return made, None

    def _record_place(self, key: Key, made: Plan) -> None:
        self._placed.add(key)
        self.quotas.record(key, None if made.keeps_place else made.placement)
        if made.keeps_place:
            self._capacity.stop_waiting(key)
        else:
            placement.record(made.placement, self._capacity, key, started_at=made.status.get("startTime") or "")

    def _take_back_place(self, key: Key, raw: Object) -> None:
        """After a refusal, keep no room for a job whose children stand on no node: no pod will come."""
        if placement.current_node(self._observer.watched(key, raw)) is None:
            self.quotas.record(key, None)
            self._capacity.unclaim(key)

    async def _apply(self, key: Key, raw: Object, seen: Observed, made: Plan) -> list[str]:
        """Delete, then write children; return what the API server refused.

        Once a write was refused, no child with pods is written. A refused deletion stops nothing.
        """
        refusals = await self._writer.delete(key, made.deletions, seen)
        refusals += await self._writer.write(key, raw, made.children, seen)
        if made.scaled and not refusals:  # a new server must find itself in the list
            refusals += await self._writer.scale(made.scaled)
        return refusals

    async def _write_status(self, key: Key, raw: Object, made: Plan, refusals: list[str], now: datetime) -> Object:
        """Write the job's status if it has changed, then its events; return the job as it is then."""
        previous: Mapping[str, Any] = raw.get("status") or {}
        status = made.status
        if made.children or refusals:
            status = statuses.with_children_applied(status, raw, refusals, now=now)
        status = conditions.bounded(status)
        if status == previous:
            return raw
        written = await self._api.apply_status(raw, status)
        if written is None:
            return raw
        if self._still_exists(key, raw):  # a job that is gone by now must not come back into the store
            self._store.put(names.KIND, written)
        for event in events(previous, status):
            try:
                await self._api.emit(raw, event, at=conditions.timestamp(now))
            except ApiRefused as error:  # the status says it already
                logger.warning("could not create an event: %s", error)
        return written

    async def _clean_up_if_ended(self, key: Key, raw: Object, written: Object, made: Plan) -> None:
        """Drop what a job that has ended needs no more, and delete it once its time to live has passed.

        It stays if somebody has changed it since it was planned: a corrected job must run, as the watch will report.
        """
        if outcome.final(made.status):
            self._observer.forget(key)
        if made.delete_job and written["metadata"]["generation"] == raw["metadata"]["generation"]:
            metadata = written["metadata"]
            same = {name: metadata[name] for name in ("uid", "resourceVersion")}
            await self._api.delete(names.KIND, key.namespace, key.name, **same)


def _revision(raw: Object) -> Revision:
    return raw["metadata"]["uid"], raw["metadata"]["generation"]
