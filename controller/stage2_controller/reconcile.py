"""One pass over one job: observe, plan, write what differs, tell the status once, then its events."""

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from stage2_controller import conditions, drift, kueue, names, outcome, reasons
from stage2_controller import status as statuses
from stage2_controller.apply import Api, ApiRefused
from stage2_controller.capacity import Capacity
from stage2_controller.draft import Drafts, Settings
from stage2_controller.events import events
from stage2_controller.fault import Faults
from stage2_controller.metrics import Metrics
from stage2_controller.observe import Key, Store, slim
from stage2_controller.observed import Object, Observed, terminating
from stage2_controller.plan import Plan, plan
from stage2_controller.progress import ProgressReader
from stage2_controller.queue import Broken, RetryLater
from stage2_controller.siting import Cluster, standing

logger = logging.getLogger(__name__)

_ROLE_OF_KIND = {
    "Deployment": names.ROLE_ROLLOUT,
    "Service": names.ROLE_ROLLOUT,
    "NetworkPolicy": names.ROLE_PODS,
    "Job": names.ROLE_LEARNER,
    "Workload": names.ROLE_QUOTA,
}

_READ_AGAIN = timedelta(minutes=2)
_KUEUE_AGAIN_S = 1.0  # Kueue wrote at the same time, and the watch has not told yet


def utc_now() -> datetime:
    """The time of a pass."""
    return datetime.now(UTC)


class Reconciler:
    """Brings jobs to what their plan says. Called by the queue, one pass at a time for each job."""

    def __init__(
        self,
        api: Api,
        store: Store,
        progress: ProgressReader,
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
        self._drafts = Drafts(settings)
        self._faults = Faults()
        self._metrics = metrics
        self._capacity = capacity
        self._kept: dict[tuple[str, Key], tuple[datetime, Object | None]] = {}  # with the time until which it serves
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
                draft_of=self._drafts.of,
            )
        except Exception as error:  # noqa: BLE001  # whatever it is, the job says so
            fault, intended = error, self._faults.plan(key, raw, error, now=now)
        self._settle(key, intended)  # before anything else is awaited: the next job must find the room taken
        refusals = await self._carry_out(key, intended, observed)
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
            await self._api.delete(names.KIND, key.namespace, key.name)
        if refusals:
            raise RetryLater("; ".join(refusals))
        if fault:
            raise Broken("a bug of the controller, told in the job's condition Accepted") from fault
        return _KUEUE_AGAIN_S if stale else intended.again_after_s

    def restore(self) -> None:
        """Enters the places of all jobs that have one, before the first pass gives away what is free."""
        for raw in list(self._store.known(names.KIND)):
            key = Key(raw["metadata"]["namespace"], raw["metadata"]["name"])
            node = None if outcome.final(raw.get("status") or {}) else standing(self._watched(key))
            if self._capacity and node:
                with suppress(Exception):  # a spec that cannot be planned by now: its pass says so, and keeps what runs
                    self._capacity.promise(key, self._drafts.of(raw).need, node)

    def forget(self, key: Key) -> None:
        """The job is gone: so is its claim to a node."""
        self._drop_files(key)
        self._drafts.forget(key)
        self._faults.forget(key)
        if self._capacity:
            self._capacity.release(key)

    def _drop_files(self, key: Key) -> None:
        for kind in ("Secret", "ConfigMap"):
            self._kept.pop((kind, key), None)

    async def _cluster(self, key: Key, raw: Object) -> Cluster | None:
        if self._capacity is None:
            return None
        name = raw["spec"].get("placement", {}).get("priorityClassName")
        if name and name not in self._priorities:
            found = await self._api.get("PriorityClass", None, name)
            if found is not None:
                self._priorities[name] = found
        return Cluster(self._capacity, key, self._priorities.get(name) if name else None)

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
        site = intended.site
        if site is None:
            self._capacity.release(key)
        elif site.node:
            self._capacity.promise(key, site.need, site.node)
        else:
            if site.refused:
                self._capacity.shun(key, site.refused)
            self._capacity.wait(key, site.need)

    def _watched(self, key: Key) -> Observed:
        def watched(kind: str) -> Object | None:
            return self._store.one(kind, key, names.child_name(key.name, _ROLE_OF_KIND[kind]))

        return Observed(
            deployment=watched("Deployment"),
            service=watched("Service"),
            networkpolicy=watched("NetworkPolicy"),
            workload=watched("Workload"),
            learner=watched("Job"),
            pods=self._store.all("Pod", key),
        )

    async def _observe(self, key: Key, raw: Object) -> Observed:
        watched = self._watched(key)
        seen = replace(watched, flavors=await self._flavors_of(watched))
        if _has_no_files(raw.get("status") or {}, seen):
            return seen
        secret = await self._read("Secret", key, names.ROLE_TOKEN)
        configmap = await self._read("ConfigMap", key, names.ROLE_CONFIG)
        progress = await self._progress.read(seen.pod(names.ROLE_LEARNER), secret)
        return Observed(**{**vars(seen), "secret": secret, "configmap": configmap, "progress": progress})

    async def _read(self, kind: str, key: Key, role: str) -> Object | None:
        """A child that is not watched; read anew only now and then, so that a steady job costs few requests."""
        kept = self._kept.get((kind, key))
        if kept and kept[0] > self._clock():
            return kept[1]
        found = await self._api.get(kind, key.namespace, names.child_name(key.name, role))
        return self._keep(kind, key, found)

    def _keep(self, kind: str, key: Key, found: Object | None) -> Object | None:
        kept = found and slim(kind, found)
        self._kept[kind, key] = self._clock() + _READ_AGAIN, kept
        return kept

    async def _carry_out(self, key: Key, intended: Plan, observed: Observed) -> list[str]:
        """Writes what differs; what the API server refused."""
        refusals: list[str] = []
        for kind in intended.deletions:
            await self._delete(kind, key)
        for write in drift.writes(intended.children, observed):
            logger.info("%s: %s %s %s", key, write.verb, write.manifest["kind"], write.manifest["metadata"]["name"])
            try:
                await self._write(write)
            except ApiRefused as error:
                refusals.append(f"{write.manifest['kind']} {write.manifest['metadata']['name']}: {error.message}")
                if error.status >= 500:
                    raise
        return refusals

    async def _delete(self, kind: str, key: Key) -> None:
        """A watch that begins just now may never tell of it: what the answer says is entered at once."""
        name = names.child_name(key.name, _ROLE_OF_KIND[kind])
        left, known = await self._api.delete(kind, key.namespace, name), self._store.one(kind, key, name)
        if left is not None:
            self._store.put(kind, left)
        elif known is not None:
            self._store.remove(kind, known)

    async def _write(self, write: drift.Write) -> None:
        kind, metadata = write.manifest["kind"], write.manifest["metadata"]
        key = Key(metadata["namespace"], metadata["annotations"][names.ANNOTATION_JOB])
        self._kept.pop((kind, key), None)
        written = await (self._api.create if write.verb == "create" else self._api.apply)(write.manifest)
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
