"""One pass over one job: observe, plan, write what differs, tell the status once, then its events."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.capacity import Capacity
from stage2_controller.cluster.progress_polls import ProgressPolls
from stage2_controller.cluster.store import Store, slim
from stage2_controller.job import conditions, diff, kueue, names, outcome, ownership, reasons
from stage2_controller.job import status as statuses
from stage2_controller.job.desired import DesiredCache
from stage2_controller.job.events import events
from stage2_controller.job.key import Key
from stage2_controller.job.observed import FIELDS, Object, Observed, terminating
from stage2_controller.job.placement import NodeView, current_node
from stage2_controller.job.plan import Plan, plan
from stage2_controller.job.settings import Settings
from stage2_controller.loop.controller_metrics import Metrics
from stage2_controller.loop.internal_error import InternalErrors
from stage2_controller.loop.work_queue import Broken, RetryLater

logger = logging.getLogger(__name__)

_ROLE_OF_KIND = {
    "Deployment": names.ROLE_ROLLOUT,
    "Service": names.ROLE_ROLLOUT,
    "NetworkPolicy": names.ROLE_PODS,
    "Job": names.ROLE_LEARNER,
    "Workload": names.ROLE_QUOTA,
}
_ROLE_OF_FILE = {"Secret": names.ROLE_TOKEN, "ConfigMap": names.ROLE_CONFIG}

_READ_AGAIN = timedelta(minutes=2)
_KUEUE_AGAIN_S = 1.0  # Kueue wrote at the same time, and the watch has not told yet


def utc_now() -> datetime:
    """The time of a pass."""
    return datetime.now(UTC)


class _NameTaken(Exception):
    """What is about to be created has the name of something that is not the job's: the next pass sees it."""


class Reconciler:
    """Brings jobs to what their plan says. Called by the queue, one pass at a time for each job."""

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
        self._desired = DesiredCache(settings)
        self._faults = InternalErrors()
        self._metrics = metrics
        self._capacity = capacity
        self._kept: dict[tuple[str, Key], tuple[datetime, Object | None]] = {}  # with the time until which it serves
        self._suspects: dict[Key, set[str]] = {}  # kinds whose names are taken, by objects that no watch shows
        self._flavors: dict[str, tuple[datetime, Object | None]] = {}  # with the time until which it serves
        self._priorities: dict[str, Object] = {}  # PriorityClasses never change
        self._clock = clock

    async def __call__(self, key: Key) -> float | None:
        """One pass; the seconds until the next one is wanted. Raises RetryLater if the API server fails."""
        result = "error"
        try:
            with self._metrics.pass_seconds.time():
                again_after_s = await self._pass(key)
            result = "done"
        except _NameTaken:
            result, again_after_s = "done", 0.0
        except RetryLater as reason:
            result = "error" if isinstance(reason, Broken) else "retry"
            raise
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            result = "retry"
            raise RetryLater(str(error) or type(error).__name__) from error
        finally:
            self._metrics.passes.labels(result).inc()
        return again_after_s

    async def _pass(self, key: Key) -> float | None:
        raw = self._store.one(names.KIND, key, key.name)
        if raw is None or terminating(raw):
            self.forget(key)
            return None
        cluster = await self._cluster(key, raw)
        observed = await self._observe(key, raw)
        now = self._clock()
        fault: Exception | None = None
        try:
            intended = plan(
                raw,
                observed,
                settings=self._settings,
                now=now,
                new_token=lambda: secrets.token_urlsafe(32),
                cluster=cluster,
                desired_of=self._desired.of,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the job says so
            fault, intended = error, self._faults.plan(key, raw, error, now=now)
        self._settle(key, intended)  # before anything else is awaited: the next job must find the room taken
        await self._find_others(key, raw, intended, observed)
        refusals = await self._carry_out(key, raw, intended, observed)
        stale = False
        if intended.workload_patch:
            name = names.child_name(key.name, names.ROLE_QUOTA)
            stale = not await self._api.patch_status("Workload", key.namespace, name, intended.workload_patch)
        if intended.gate:
            await self._api.apply_condition(key.namespace, intended.gate, at=conditions.timestamp(now))
        await self._tell(raw, intended, refusals, now)
        if outcome.final(intended.status):
            self._drop_files(key)
        if intended.delete_job:
            await self._api.delete(names.KIND, key.namespace, key.name, uid=raw["metadata"]["uid"])
        if refusals:
            raise RetryLater("; ".join(refusals))
        if fault:
            raise Broken("a bug of the controller, told in the job's condition Accepted") from fault
        return _KUEUE_AGAIN_S if stale else intended.again_after_s

    def restore(self) -> None:
        """Enters the places of all jobs that have one, before the first pass gives away what is free."""
        for raw in list(self._store.known(names.KIND)):
            key = Key(raw["metadata"]["namespace"], raw["metadata"]["name"])
            node = None if outcome.final(raw.get("status") or {}) else current_node(self._watched(key, raw))
            if self._capacity and node:
                with suppress(Exception):  # a spec that cannot be planned by now: its pass says so, and keeps what runs
                    self._capacity.promise(key, self._desired.of(raw).need, node)

    def forget(self, key: Key) -> None:
        """The job is gone: so is its claim to a node."""
        self._drop_files(key)
        self._desired.forget(key)
        self._faults.forget(key)
        self._progress.forget(key)
        if self._capacity:
            self._capacity.release(key)

    def _drop_files(self, key: Key) -> None:
        for kind in _ROLE_OF_FILE:
            self._kept.pop((kind, key), None)
        self._suspects.pop(key, None)

    async def _cluster(self, key: Key, raw: Object) -> NodeView | None:
        if self._capacity is None:
            return None
        name = raw["spec"].get("placement", {}).get("priorityClassName")
        if name and name not in self._priorities:
            found = await self._api.get("PriorityClass", None, name)
            if found is not None:
                self._priorities[name] = found
        return NodeView(self._capacity, key, self._priorities.get(name) if name else None)

    async def _flavors_of(self, observed: Observed) -> dict[str, Object]:
        """The ResourceFlavors that the job was assigned; they are few, and many jobs share them."""
        for name in kueue.flavors_of(observed.workload):
            kept = self._flavors.get(name)
            if kept is None or kept[0] <= self._clock():
                self._flavors[name] = self._clock() + _READ_AGAIN, await self._api.get("ResourceFlavor", None, name)
        found = {name: self._flavors[name][1] for name in kueue.flavors_of(observed.workload)}
        return {name: flavor for name, flavor in found.items() if flavor is not None}

    def _settle(self, key: Key, intended: Plan) -> None:
        """Enters the job's place into the account of the nodes."""
        if self._capacity is None or intended.keeps_place:
            return
        placement = intended.placement
        if placement is None:
            self._capacity.release(key)
        elif placement.node:
            self._capacity.promise(key, placement.need, placement.node)
        else:
            if placement.refused:
                self._capacity.exclude(key, placement.refused)
            self._capacity.wait(key, placement.need)

    def _watched(self, key: Key, raw: Object) -> Observed:
        def watched(kind: str) -> Object | None:
            return self._store.one(kind, key, names.child_name(key.name, _ROLE_OF_KIND[kind]))

        children: dict[str, Any] = {FIELDS[kind]: watched(kind) for kind in _ROLE_OF_KIND}
        return ownership.owned(Observed(**children, pods=self._store.all("Pod", key)), raw["metadata"])

    async def _observe(self, key: Key, raw: Object) -> Observed:
        watched, suspects = self._watched(key, raw), self._suspects.pop(key, set())
        seen = replace(watched, flavors=await self._flavors_of(watched))
        files = set() if _has_no_files(raw.get("status") or {}, seen) else set(_ROLE_OF_FILE)
        if not files | suspects:
            return seen
        found = {kind: await self._read(kind, key) for kind in sorted(files | suspects)}
        told: dict[str, Any] = {FIELDS[kind]: body for kind, body in found.items()}
        asked = ownership.owned(Observed(**told), raw["metadata"])
        for kind, body in found.items():
            if body is not None:
                self._is_another(kind, key, raw, body)
        own: dict[str, Any] = {FIELDS[kind]: body for kind in found if (body := asked.child(kind)) is not None}
        progress = self._progress.latest(key, seen.pod(names.ROLE_LEARNER), asked.secret)
        others: dict[str, Any] = {
            name: tuple(sorted({*getattr(seen, name), *getattr(asked, name)})) for name in ("leaving", "foreign")
        }
        return replace(seen, **own, **others, progress=progress)

    async def _read(self, kind: str, key: Key) -> Object | None:
        """A child that is not watched; read anew only now and then, so that a steady job costs few requests."""
        kept = self._kept.get((kind, key))
        if kept and kept[0] > self._clock():
            return kept[1]
        found = await self._get(kind, key)
        return self._keep(kind, key, found) if kind in _ROLE_OF_FILE else found

    async def _get(self, kind: str, key: Key) -> Object | None:
        role = {**_ROLE_OF_KIND, **_ROLE_OF_FILE}[kind]
        return await self._api.get(kind, key.namespace, names.child_name(key.name, role))

    def _keep(self, kind: str, key: Key, found: Object | None) -> Object | None:
        kept = found and slim(kind, found)
        self._kept[kind, key] = self._clock() + _READ_AGAIN, kept
        return kept

    async def _find_others(self, key: Key, raw: Object, intended: Plan, observed: Observed) -> None:
        """Before the first child is applied, raises _NameTaken if one of the names is: an apply would take it over.

        Of what is created, and not applied, the API server says so itself. The learner's name is looked at with the
        servers': they would load for nothing.
        """
        absent = [child["kind"] for child in intended.children if observed.child(child["kind"]) is None]
        kinds = [kind for kind in absent if kind not in diff.CREATE_ONCE]
        if "Deployment" in kinds and observed.learner is None:
            kinds.append("Job")
        found = await asyncio.gather(*(self._get(kind, key) for kind in kinds))
        others = [self._is_another(kind, key, raw, body) for kind, body in zip(kinds, found, strict=True) if body]
        if any(others):
            raise _NameTaken

    def _is_another(self, kind: str, key: Key, raw: Object, body: Object) -> bool:
        """Whether it is not the job's; then every pass looks at it until it is gone."""
        another = ownership.whose(body, raw["metadata"]) != "own"
        if another:
            self._kept.pop((kind, key), None)
            self._suspects.setdefault(key, set()).add(kind)
        return another

    async def _carry_out(self, key: Key, raw: Object, intended: Plan, observed: Observed) -> list[str]:
        """Writes what differs; what the API server refused."""
        refusals: list[str] = []
        for kind in intended.deletions:
            if there := observed.child(kind):
                await self._delete(kind, key, there)
        for write in diff.writes(intended.children, observed):
            logger.info("%s: %s %s %s", key, write.verb, write.manifest["kind"], write.manifest["metadata"]["name"])
            try:
                await self._write(write, key, raw)
            except ApiRefused as error:
                refusals.append(f"{write.manifest['kind']} {write.manifest['metadata']['name']}: {error.message}")
                if error.status >= 500:
                    raise
        return refusals

    async def _delete(self, kind: str, key: Key, there: Object) -> None:
        """A watch that begins just now may never tell of it: what the answer says is entered at once."""
        metadata = there["metadata"]
        left = await self._api.delete(kind, key.namespace, metadata["name"], uid=metadata["uid"])
        if left is not None:
            self._store.put(kind, left)
        else:
            self._store.remove(kind, there)

    async def _write(self, write: diff.Write, key: Key, raw: Object) -> None:
        kind = write.manifest["kind"]
        self._kept.pop((kind, key), None)
        written = await (self._api.create if write.verb == "create" else self._api.apply)(write.manifest)
        if written is None:  # it exists
            written = await self._get(kind, key)
            if written is not None and self._is_another(kind, key, raw, written):
                raise _NameTaken
        if written is not None and kind in _ROLE_OF_KIND:
            self._store.put(kind, written)
        elif written is not None:
            self._keep(kind, key, written)

    async def _tell(self, raw: Object, intended: Plan, refusals: list[str], now: datetime) -> None:
        previous: Mapping[str, Any] = raw.get("status") or {}
        status = intended.status
        if intended.children:
            status = statuses.with_refusals(status, previous, refusals, now=now)
        if status == previous:
            return
        written = await self._api.apply_status(raw, status)
        if written is None:
            return
        self._store.put(names.KIND, written)
        for event in events(previous, status):
            try:
                await self._api.emit(raw, event, at=conditions.timestamp(now))
            except ApiRefused as error:  # an event is a courtesy; the status has already told
                logger.warning("no event: %s", error)


def _has_no_files(status: Mapping[str, Any], seen: Observed) -> bool:
    """Whether Secret and ConfigMap need not be read: the job has ended, or nothing was created for it yet."""
    if outcome.final(status):
        return True
    placed = conditions.find(status, reasons.PLACED)
    unplaced = not status or (placed is not None and placed["status"] == "False")
    return unplaced and seen.deployment is None and seen.learner is None
