"""The observation of one job: watched children from the store, the others read by name; only its own count."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any

from stage2_api.section import is_subdomain
from stage2_controller import conditions, outcome, reasons
from stage2_controller.children import comparison
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.named_objects import NamedObjects
from stage2_controller.cluster.progress_polls import ProgressPolls
from stage2_controller.cluster.refused_pods import RefusedPods
from stage2_controller.observed import Object, Observed
from stage2_controller.queue import kueue
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.spec.objects import at
from stage2_controller.store import Store

_WATCHED = tuple(child.kind for child in kinds.CHILDREN if child.watched)
_READ_AGAIN = timedelta(minutes=10)  # what a person did to a Secret or ConfigMap counts by then; two reads a job
_UNWATCHED = tuple(child.kind for child in kinds.CHILDREN if not child.watched)


class Observer:
    """An observer of jobs, which remembers under which of their names something stands that is not theirs."""

    def __init__(
        self, api: Api, store: Store, progress: ProgressPolls, *, kueue_served: bool, clock: Callable[[], datetime]
    ) -> None:
        self._api = api
        self._kueue_served = kueue_served
        self._store = store
        self._progress = progress
        self._named = NamedObjects(api, clock, kept_for=_READ_AGAIN)
        self._shared = NamedObjects(api, clock)  # by many jobs
        self._refused_pods = RefusedPods(api, clock)
        self._suspects: dict[Key, set[str]] = {}  # kinds whose names are taken, maybe by objects that no watch shows

    async def observe(self, key: Key, job: Object) -> Observed:
        """Return what there is of a job."""
        watched = self.watched(key, job)
        seen = replace(
            watched,
            flavors=await self._flavors(watched),
            priority_class=await self._queue_priority(job, watched),
            pod_priority_class=await self._pod_priority(job),
            learner_refused=await self._refused_pods.of_learner(key, watched, job.get("status") or {}),
        )
        if not (seen.deployment or seen.learner or job["spec"].get("suspend")):
            for kind in _UNWATCHED:  # pods that are made now must find what is there now
                self.forget_read(kind, key)
        unwatched = () if _needs_no_files(job.get("status") or {}, seen) else _UNWATCHED
        to_read = sorted({*unwatched, *self._suspects.pop(key, ())})
        if not to_read:
            return seen
        found = {kind: await self._read(kind, key) for kind in to_read}
        self.suspect(key, others_in(found, job))
        read = comparison.owned(_observed(found), job["metadata"])
        progress = self._progress.latest(key, seen.pod(names.ROLE_LEARNER), read.secret)
        return replace(_together(seen, read), progress=progress)

    def watched(self, key: Key, job: Object) -> Observed:
        """Return what the watches have told of a job."""
        children = {kind: self._store.one(kind, key, child_name(kind, key)) for kind in _WATCHED}
        seen = replace(
            _observed(children),
            pods=self._store.all(kinds.POD.kind, key),
            replicasets=self._store.all(kinds.REPLICA_SET.kind, key),
            endpointslices=self._store.all(kinds.ENDPOINT_SLICE.kind, key),
        )
        return comparison.after_namesakes(
            comparison.owned(seen, job["metadata"]), job["metadata"], self._store.namesakes(key)
        )

    async def read_now(self, kind: str, key: Key) -> Object | None:
        """Return the object with the name of a child, as the API server has it now."""
        return await self._api.get(kind, key.namespace, child_name(kind, key))

    def written(self, kind: str, key: Key, body: Object) -> None:
        """Take in what a write has answered: the watch may tell of it after the next pass."""
        if kind in _WATCHED:
            self._store.put(kind, body)
        else:
            self._named.put(kind, key.namespace, child_name(kind, key), body)

    def published(self, body: Object) -> None:
        """Take in an EndpointSlice that was written."""
        self._store.put(kinds.ENDPOINT_SLICE.kind, body)

    def deleted(self, kind: str, body: Object, left: Object | None) -> None:
        """Take in what a deletion has left: a watch that begins just now may never tell of it."""
        if left is not None:
            self._store.put(kind, left)
        else:
            self._store.remove(kind, body)

    def forget_read(self, kind: str, key: Key) -> None:
        """Read the child anew in the next pass."""
        self._named.forget(kind, key.namespace, child_name(kind, key))

    def forget(self, key: Key) -> None:
        """Drop what was read of a job that has ended or is gone."""
        for kind in _UNWATCHED:
            self.forget_read(kind, key)
        self._suspects.pop(key, None)
        self._refused_pods.forget(key)

    def suspect(self, key: Key, others: set[str]) -> None:
        """Make every pass look at these names until they are free."""
        for kind in others:
            self.forget_read(kind, key)
            self._suspects.setdefault(key, set()).add(kind)

    async def _flavors(self, observed: Observed) -> dict[str, Object]:
        """Return the ResourceFlavors that the job was assigned; they are few, and many jobs share them."""
        assigned = kueue.flavors_of(observed.workload)
        found = {name: await self._shared.get("ResourceFlavor", None, name) for name in assigned}
        return {name: flavor for name, flavor in found.items() if flavor is not None}

    async def _queue_priority(self, job: Object, observed: Observed) -> Object | None:
        """Return the WorkloadPriorityClass that a job names which has no Workload yet; others were given theirs."""
        name = kueue.priority_name(job)
        if not (self._kueue_served and name) or observed.workload is not None:
            return None
        return await self._class("WorkloadPriorityClass", name)

    async def _pod_priority(self, job: Object) -> Object | None:
        """Return the PriorityClass of the job's pods; None where none is named, or the controller may not read it."""
        name = at(job["spec"], "placement", "priorityClassName")
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
        return await self._named.get(kind, key.namespace, child_name(kind, key))


def child_name(kind: str, key: Key) -> str:
    """Return the name of the child of a kind."""
    return names.child_name(key.name, kinds.CHILD[kind].role)


def others_in(found: Mapping[str, Object | None], job: Object) -> set[str]:
    """Return the kinds of those objects that are not the job's."""
    return {
        kind for kind, body in found.items() if body is not None and comparison.whose(body, job["metadata"]) != "own"
    }


def _observed(children: Mapping[str, Object | None]) -> Observed:
    fields: dict[str, Any] = {kinds.CHILD[kind].field: body for kind, body in children.items()}
    return Observed(**fields)


def _together(seen: Observed, read: Observed) -> Observed:
    """Return what was seen with the children that were read."""
    own: dict[str, Any] = {
        child.field: body for child in kinds.CHILDREN if (body := read.child(child.kind)) is not None
    }
    leaving = tuple(sorted({*seen.leaving, *read.leaving}))
    return replace(seen, **own, leaving=leaving, foreign=tuple(sorted({*seen.foreign, *read.foreign})))


def _needs_no_files(status: Mapping[str, Any], seen: Observed) -> bool:
    """Return whether Secret and ConfigMap need not be read: the job has ended, or nothing was created for it yet."""
    if outcome.final(status):
        return True
    placed = conditions.find(status, reasons.PLACED)
    unplaced = not status or (placed is not None and placed["status"] == "False")
    return unplaced and seen.deployment is None and seen.learner is None
