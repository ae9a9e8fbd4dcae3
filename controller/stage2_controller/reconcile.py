"""One pass over one job: observe, plan, write what differs, tell the status once, then its events."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import aiohttp

from stage2_api.errors import ConfigError
from stage2_controller import conditions, outcome
from stage2_controller.children.build import JobCache, ParsedJob, is_large, parse_or_error
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.apply import ChildWriter, NameTaken
from stage2_controller.cluster.observe import Observer, child_name
from stage2_controller.cluster.progress import ProgressPolls
from stage2_controller.internal_error import InternalErrors
from stage2_controller.metrics import Metrics
from stage2_controller.observed import Object, Observed, terminating
from stage2_controller.place import node_fit, placement
from stage2_controller.place.capacity import Capacity, Snapshot
from stage2_controller.place.placement import current_node
from stage2_controller.plan import Plan, plan
from stage2_controller.report import status as statuses
from stage2_controller.report.explanation import events
from stage2_controller.spec import credentials, names
from stage2_controller.spec.names import Key
from stage2_controller.spec.settings import Settings
from stage2_controller.store import Store
from stage2_controller.work_queue import Broken, RetryLater

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0  # somebody wrote at the same time, and the watch has not told yet


def utc_now() -> datetime:
    """Return the time of a pass."""
    return datetime.now(UTC)


ParseCached = Callable[[Mapping[str, Any]], ParsedJob]


def _given(made: ParsedJob | BaseException) -> ParseCached:
    """Return what gives a parsed job that is there, or raises why it is not."""

    def parse_cached(_: Mapping[str, Any]) -> ParsedJob:
        if isinstance(made, ParsedJob):
            return made
        raise made.with_traceback(None) if isinstance(made, ConfigError) else made  # a bug's traceback is logged

    return parse_cached


class Reconciler:
    """The passes that bring jobs to what their plan says. The queue makes one at a time for each job."""

    def __init__(
        self,
        api: Api,
        store: Store,
        progress: ProgressPolls,
        settings: Settings,
        *,
        metrics: Metrics,
        capacity: Capacity | None = None,  # None: the scheduler alone chooses nodes
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        self._api = api
        self._store = store
        self._progress = progress
        self._settings = settings
        self._metrics = metrics
        self._capacity = capacity
        self._clock = clock
        self._jobs = JobCache(settings)
        self._reader = ThreadPoolExecutor(1, "read-specs")  # one: the loop shares its processor with these alone
        self._internal_errors = InternalErrors()
        self._observer = Observer(api, store, progress, kueue_served=settings.kueue, clock=clock)
        self._writer = ChildWriter(api, self._observer)

    async def __call__(self, key: Key) -> float | None:
        """Make one pass; return the seconds until the next one is wanted. Raise RetryLater if the API server fails."""
        result = "retry"  # also of a pass that is cancelled: a replica that loses its Lease has met no bug
        try:
            with self._metrics.pass_seconds.time():
                again_after_s = await self._pass(key)
            result = "done"
        except NameTaken:
            result, again_after_s = "done", 0.0
        except RetryLater as reason:  # what was refused is told, and counted from there
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
        job = self._store.one(names.KIND, key, key.name)
        if job is None or terminating(job):
            self.forget(key)
            return None
        parse_cached = await self._read(job)
        observed = await self._observer.observe(key, job)
        if not self._is_there(key, job):  # a promise that is made from here on nobody would end
            self.forget(key)
            return None
        now = self._clock()
        nodes = self._capacity.snapshot(key) if self._capacity else None
        made, bug = self._plan(key, job, observed, nodes, now, parse_cached)
        self._settle(key, made)  # before anything else is awaited: the next job must find the room taken
        refusals = await self._writer.delete(key, made.deletions, observed)
        refusals += await self._writer.write(key, job, made.children, observed)
        if refusals and self._capacity and current_node(self._observer.watched(key, job)) is None:
            self._capacity.unclaim(key)  # no pod is on its way
        refusals += await self._writer.publish(key, made.slices)
        stale = not await self._tell_kueue(key, made)
        if made.gate:
            await self._api.apply_condition(key.namespace, made.gate, at=conditions.timestamp(now))
        told = await self._tell(key, job, made, refusals, now)
        stale |= not await self._end(key, job, told, made)
        if refusals:
            raise RetryLater("; ".join(refusals))
        if bug:
            raise Broken("a bug of the controller, told in the job's condition Accepted") from bug
        return _AGAIN_S if stale else made.again_after_s

    def restore(self) -> None:
        """Keep room for the pods of all jobs that have a node, before the first pass gives away what is free."""
        for job in list(self._store.known(names.KIND)) if self._capacity else ():
            if outcome.final(job.get("status") or {}):
                continue
            key = Key(job["metadata"]["namespace"], job["metadata"]["name"])
            observed = self._observer.watched(key, job)
            node = current_node(observed)
            if self._capacity and node:
                children = {names.ROLE_ROLLOUT: observed.deployment, names.ROLE_LEARNER: observed.learner}
                standing = {role: child for role, child in children.items() if child and not terminating(child)}
                templates = {role: child["spec"]["template"] for role, child in standing.items()}
                self._capacity.promise(key, node_fit.need_of(templates, gpu_resource=""), node)

    def _is_there(self, key: Key, job: Object) -> bool:
        """Return whether this very job still exists: while something is awaited, the watch may tell of its end."""
        known = self._store.one(names.KIND, key, key.name)
        return known is not None and not terminating(known) and known["metadata"]["uid"] == job["metadata"]["uid"]

    def forget(self, key: Key) -> None:
        """Drop what is known of a job that is gone, and its claim to a node."""
        self._observer.forget(key)
        self._jobs.forget(key)
        self._internal_errors.forget(key)
        self._progress.forget(key)
        if self._capacity:
            self._capacity.release(key)

    async def _read(self, job: Object) -> ParseCached:
        """Return what gives a pass the parsed job, or raises what its spec raises.

        A large spec is read in a thread: meanwhile the loop serves the other jobs. So the pass holds what was read,
        also a bug, and what passes of other jobs may displace until it plans.
        """
        known = self._jobs.get(job)
        if known is None and not is_large(job):
            return self._jobs.parse
        made: ParsedJob | BaseException = known or await self._read_aside(job)
        if isinstance(made, ParsedJob | ConfigError):
            self._jobs.put(job, made)
        return _given(made)

    async def _read_aside(self, job: Object) -> ParsedJob | BaseException:
        reading = asyncio.get_running_loop().run_in_executor(self._reader, parse_or_error, job, self._settings)
        (made,) = await asyncio.gather(reading, return_exceptions=True)
        return made

    def _plan(
        self,
        key: Key,
        job: Object,
        observed: Observed,
        nodes: Snapshot | None,
        now: datetime,
        parse_cached: ParseCached,
    ) -> tuple[Plan, Exception | None]:
        """Return the plan; where making it meets a bug, one that says so, and the bug."""
        try:
            made = plan(
                job,
                observed,
                settings=self._settings,
                now=now,
                new_credentials=credentials.new,
                nodes=nodes,
                parse_cached=parse_cached,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the job says so
            return self._internal_errors.plan(key, job, error, now=now), error
        return made, None

    def _settle(self, key: Key, made: Plan) -> None:
        """Enter the job's place into the account of the nodes."""
        if self._capacity is None:
            return
        if made.keeps_place:
            self._capacity.stop_waiting(key)
        else:
            placement.record(made.placement, self._capacity, key, came=made.status.get("startTime") or "")

    async def _tell_kueue(self, key: Key, made: Plan) -> bool:
        """Answer in the job's Workload; False if Kueue has written it since it was seen."""
        if not made.workload_patch:
            return True
        name = child_name("Workload", key)
        return await self._api.patch_status("Workload", key.namespace, name, made.workload_patch)

    async def _tell(self, key: Key, job: Object, made: Plan, refusals: list[str], now: datetime) -> Object:
        """Write the job's status where it is another one, and its events; return the job as it is known then."""
        previous: Mapping[str, Any] = job.get("status") or {}
        status = made.status
        if made.children or refusals:
            status = statuses.with_refusals(status, job, refusals, now=now)
        status = conditions.bounded(status)
        if status == previous:
            return job
        written = await self._api.apply_status(job, status)
        if written is None:
            return job
        if self._is_there(key, job):  # what has gone since the answer must not come back by it
            self._store.put(names.KIND, written)
        for event in events(previous, status):
            try:
                await self._api.emit(job, event, at=conditions.timestamp(now))
            except ApiRefused as error:  # an event is a courtesy; the status has already told
                logger.warning("no event: %s", error)
        return written

    async def _end(self, key: Key, job: Object, told: Object, made: Plan) -> bool:
        """Drop what a job that has ended needs no more; delete it once its time to live has passed.

        False if it is not the job any more that was planned: whoever corrects a failed one wants it to run.
        """
        if outcome.final(made.status):
            self._observer.forget(key)
        if not made.delete_job:
            return True
        same = told["metadata"]["generation"] == job["metadata"]["generation"]
        return same and await self._api.delete_as_read(names.KIND, told)
