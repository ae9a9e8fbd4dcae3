"""What is observed of one job: watched children from the store, the others read by name. Only its own objects count."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

import aiohttp

from stage2_api.section import is_subdomain
from stage2_controller.children import comparison
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.progress import ProgressPolls
from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.job.objects import value_at
from stage2_controller.place import binding
from stage2_controller.plan import outcome
from stage2_controller.queue import kueue
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import FILES_AGAIN_S, Object, Observed, role_of
from stage2_controller.state.store import Store, slim

logger = logging.getLogger(__name__)

_WATCHED = tuple(child.kind for child in kinds.CHILDREN if child.watched)
_FILES = tuple(child.kind for child in kinds.CHILDREN if not child.watched and not child.has_pods)
_KEPT_FOR = timedelta(minutes=2)  # an object that many jobs share
_OWN_KEPT_FOR = timedelta(seconds=FILES_AGAIN_S)  # a job's Secret and ConfigMap, in case a person changes them
# The API server reads all events of the namespace for one query; one quota may refuse the pods of a thousand jobs.
_EVENTS_KEPT_FOR = timedelta(minutes=5)


class Observer:
    """Observes jobs, and remembers which of their children's names other objects have."""

    def __init__(
        self, api: Api, store: Store, progress: ProgressPolls, *, kueue_served: bool, clock: Callable[[], datetime]
    ) -> None:
        self._api = api
        self._kueue_served = kueue_served
        self._store = store
        self._progress = progress
        self._own = ReadCache(api, clock, kept_for=_OWN_KEPT_FOR)
        self._shared = ReadCache(api, clock)
        self._failures = CreationFailures(api, clock)
        self._suspects: dict[Key, set[str]] = {}  # kinds whose names other objects have; no watch may show those

    async def observe(self, key: Key, job: Object) -> Observed:
        """Return what exists of a job."""
        watched = self.watched(key, job)
        seen = await (self._with_jobset if names.runs_as_jobset(job) else self._on_one_node)(key, job, watched)
        if not (seen.deployment or seen.learner or seen.jobset or job["spec"].get("suspend")):
            for kind in _FILES:  # pods that are created in this pass must find what exists now
                self.forget_read(kind, key)
        files = () if _needs_no_files(job.get("status") or {}, seen) else _FILES
        unlabelled = set() if names.runs_as_jobset(job) else _parents_unseen(seen)
        to_read = sorted({*files, *unlabelled, *self._suspects.pop(key, ())})
        if not to_read:
            return seen
        found = {kind: await self._read(kind, key) for kind in to_read}
        self.suspect(key, others_in(found, job))
        read = comparison.owned(_observed(found), job["metadata"])
        learner, servers = seen.pod(names.ROLE_LEARNER), seen.server_processes()
        return replace(
            _merged(seen, read),
            progress=self._progress.latest(key, learner, read.secret, servers),
            baseline=self._progress.baseline(key, servers),
            unreachable=self._progress.unreachable(key),
        )

    async def _on_one_node(self, key: Key, job: Object, watched: Observed) -> Observed:
        """Return also what matters for the place of a job, and its quota."""
        return replace(
            watched,
            flavors=await self._flavors(watched),
            priority_class=await self._queue_priority(job, watched),
            pod_priority_class=await self._pod_priority(job),
            learner_refused=await self._failures.of_learner(key, watched, job.get("status") or {}),
        )

    async def _with_jobset(self, key: Key, job: Object, watched: Observed) -> Observed:
        """Return also the JobSet of a job, as it is now: no watch shows it, for it need not be installed.

        With it comes its Job of the servers, whose number of pods may have to change.
        """
        found = comparison.owned(Observed(jobset=await self.read_now(names.JOBSET, key)), job["metadata"])
        servers = names.jobset_job(key.name, names.ROLE_ROLLOUT)
        of_servers = await self._api.get("Job", key.namespace, servers) if found.jobset else None
        owner = comparison.controller_of(of_servers) if of_servers else None
        if owner is None or found.jobset is None or owner["uid"] != found.jobset["metadata"]["uid"]:
            of_servers = None  # somebody else's
        return replace(watched, jobset=found.jobset, rollout_job=of_servers, **_with_others(watched, found))

    def watched(self, key: Key, job: Object) -> Observed:
        """Return what the watches have shown of a job."""
        children = {kind: self._store.one(kind, key, child_name(kind, key)) for kind in _WATCHED}
        seen = replace(
            _observed(children),
            pods=self._store.all(kinds.POD.kind, key),
        )
        return comparison.owned(seen, job["metadata"])

    async def read_now(self, kind: str, key: Key) -> Object | None:
        """Return the object with the name of a child, as the API server has it now."""
        return await self._api.get(kind, key.namespace, child_name(kind, key))

    def note_written(self, kind: str, key: Key, body: Object) -> None:
        """Take in the answer to a write: the watch may deliver it after the next pass."""
        if kind not in _WATCHED:
            self._own.put(kind, key.namespace, child_name(kind, key), body)
        else:
            self._store.put(kind, body)

    def note_deleted(self, kind: str, body: Object, remaining: Object | None) -> None:
        """Take in what remains after a deletion: a watch that starts just now may never deliver it."""
        if remaining is not None:
            self._store.put(kind, remaining)
        else:
            self._store.remove(kind, body)

    def forget_read(self, kind: str, key: Key) -> None:
        """Read the child again in the next pass."""
        self._own.forget(kind, key.namespace, child_name(kind, key))

    def forget(self, key: Key) -> None:
        """Drop what was read of a job that has ended or is gone."""
        for kind in (*_FILES, names.JOBSET):
            self.forget_read(kind, key)
        self._suspects.pop(key, None)
        self._failures.forget(key)

    def suspect(self, key: Key, others: set[str]) -> None:
        """Make every pass look at these names until they are free."""
        for kind in others:
            self.forget_read(kind, key)
            self._suspects.setdefault(key, set()).add(kind)

    async def _flavors(self, observed: Observed) -> dict[str, Object]:
        """Return the ResourceFlavors that Kueue assigned to the job."""
        assigned = kueue.flavors_of(observed.workload)
        found = {name: await self._shared.get("ResourceFlavor", None, name) for name in assigned}
        return {name: flavor for name, flavor in found.items() if flavor is not None}

    async def _queue_priority(self, job: Object, observed: Observed) -> Object | None:
        """Return the WorkloadPriorityClass that a job without a Workload names; a Workload already has its priority."""
        name = kueue.priority_name(job)
        if not (self._kueue_served and name) or observed.workload is not None:
            return None
        return await self._class("WorkloadPriorityClass", name)

    async def _pod_priority(self, job: Object) -> Object | None:
        """Return the PriorityClass of the job's pods; None where none is named, or the controller may not read it."""
        name = value_at(job["spec"], "placement", "priorityClassName")
        if not (isinstance(name, str) and is_subdomain(name)):
            return None
        try:
            return await self._class("PriorityClass", name)
        except ApiRefused as error:
            if error.status != HTTPStatus.FORBIDDEN:
                raise
            return None

    async def _class(self, kind: str, name: str) -> Object | None:
        found = await self._shared.get(kind, None, name)
        if found is None:  # it counts as soon as it exists
            self._shared.forget(kind, None, name)
        return found

    async def _read(self, kind: str, key: Key) -> Object | None:
        if kind in _WATCHED:
            return await self.read_now(kind, key)
        return await self._own.get(kind, key.namespace, child_name(kind, key))


class ReadCache:
    """Objects that no watch shows, each read again after `kept_for`. It also keeps that an object does not exist."""

    def __init__(self, api: Api, clock: Callable[[], datetime], *, kept_for: timedelta = _KEPT_FOR) -> None:
        self._api = api
        self._clock = clock
        self._kept_for = kept_for
        self._kept: dict[tuple[str, str | None, str], tuple[datetime, Object | None]] = {}  # with the time of the read

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None."""
        kept = self._kept.get((kind, namespace, name))
        if kept and _is_fresh(kept[0], self._kept_for, self._clock()):
            return kept[1]
        return self.put(kind, namespace, name, await self._api.get(kind, namespace, name))

    def put(self, kind: str, namespace: str | None, name: str, body: Object | None) -> Object | None:
        """Keep the object as it is now, and return the part of it that is kept."""
        kept = slim(kind, body) if body is not None else None
        self._kept[kind, namespace, name] = self._clock(), kept
        return kept

    def forget(self, kind: str, namespace: str | None, name: str) -> None:
        """Read the object again when it is needed next."""
        self._kept.pop((kind, namespace, name), None)


class CreationFailures:
    """Why the API server refuses the pods of learners' Jobs. Only events of the Job controller say it.

    Nobody watches events, for there are many. They are read every few minutes where a pod has been missing for a while.
    """

    def __init__(self, api: Api, clock: Callable[[], datetime]) -> None:
        self._api = api
        self._clock = clock
        self._kept: dict[Key, tuple[datetime, str | None]] = {}  # with the time of the read

    async def of_learner(self, key: Key, seen: Observed, status: Mapping[str, Any]) -> str | None:
        """Return why the learner's Job has no pod; None where no event says it, or none has been missing for long.

        status: the one that the last pass wrote.
        """
        now, since = self._clock(), binding.learner_unmade_since(seen, status)
        if seen.learner is None or since is None or conditions.seconds_left(since, binding.UNMADE_S, now) > 0:
            self.forget(key)
            return None
        kept = self._kept.get(key)
        if kept is None or not _is_fresh(kept[0], _EVENTS_KEPT_FOR, now):
            message = await self._newest(key.namespace, seen.learner["metadata"]["uid"], since)
            kept = self._kept[key] = now, message
        return kept[1]

    def forget(self, key: Key) -> None:
        """Drop what was read of a job."""
        self._kept.pop(key, None)

    async def _newest(self, namespace: str, uid: str, since: datetime) -> str | None:
        """Return the newest message since then: the cause of an older one may be gone."""
        try:
            events = await self._api.events_of(namespace, uid, "FailedCreate")
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:  # the job can do without the message
            logger.warning("cannot read why a pod is not created: %s", str(error) or type(error).__name__)
            return None
        messages = [(_last_seen(event), str(event["message"])) for event in events if event.get("message")]
        return max((one for one in messages if one[0] >= since), default=(since, None))[1]


def _is_fresh(read_at: datetime, kept_for: timedelta, now: datetime) -> bool:
    """Return whether what was read then still counts. It does not where the clock was set back since then."""
    return timedelta() <= now - read_at < kept_for


def child_name(kind: str, key: Key) -> str:
    """Return the name of the child of a kind."""
    return names.child_name(key.name, kinds.CHILD[kind].role)


def _parents_unseen(seen: Observed) -> set[str]:
    """Return the kinds of children that no watch shows, and whose pods are there: they may have lost their label."""
    of_pods = {kinds.KIND_OF_ROLE[role] for pod in seen.pods if (role := role_of(pod)) in kinds.KIND_OF_ROLE}
    return {kind for kind in of_pods if seen.child(kind) is None}


def others_in(found: Mapping[str, Object | None], job: Object) -> set[str]:
    """Return the kinds of those objects that are not the job's."""
    return {
        kind for kind, body in found.items() if body is not None and comparison.whose(body, job["metadata"]) != "own"
    }


def _last_seen(event: Object) -> datetime:
    """Return when an event happened last; which of its times are set depends on who wrote it."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return max(conditions.instant(time) for time in (*times, event["metadata"]["creationTimestamp"]) if time)


def _observed(children: Mapping[str, Object | None]) -> Observed:
    fields: dict[str, Any] = {kinds.CHILD[kind].field: body for kind, body in children.items()}
    return Observed(**fields)


def _merged(seen: Observed, read: Observed) -> Observed:
    """Return what the watches showed and what was read."""
    own: dict[str, Any] = {
        child.field: body for child in kinds.CHILDREN if (body := read.child(child.kind)) is not None
    }
    return replace(seen, **own, **_with_others(seen, read))


def _with_others(seen: Observed, read: Observed) -> dict[str, Any]:
    """Return the names, from both, of objects that are not the job's."""
    return {
        field: tuple(sorted({*getattr(seen, field), *getattr(read, field)}))
        for field in ("leaving", "unowned", "foreign")
    }


def _needs_no_files(status: Mapping[str, Any], seen: Observed) -> bool:
    """Return whether Secret and ConfigMap need not be read: the job has ended, or nothing was created for it yet."""
    if outcome.final(status):
        return True
    placed = conditions.find(status, reasons.PLACED)
    unplaced = "phase" not in status or (placed is not None and placed["status"] == "False")
    none = not (seen.deployment or seen.learner or seen.jobset or seen.pods)
    return unplaced and none and not seen.unowned
