"""An API server that is a dictionary, and the controller's passes over one job of it."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from stage2_api.job_status import JobStatus
from stage2_controller.cluster.api_server import ApiRefused
from stage2_controller.cluster.progress import ProgressPolls
from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.loop.metrics import Metrics
from stage2_controller.loop.reconcile import Reconciler
from stage2_controller.place.capacity import Capacity
from stage2_controller.state import conditions, reasons
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b

KEY = Key("team-a", "job-3v1")
WATCHED = [resource.kind for resource in kinds.watched(kueue=False)]
Object = dict[str, Any]


@dataclass
class Server:
    """Objects by kind and name, and every request that was made."""

    objects: dict[tuple[str, str], Object] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    unseen: list[tuple[str, Object]] = field(default_factory=list)  # what others changed: the watch's next events
    versions: Iterator[int] = field(default_factory=lambda: count(2))
    refused: dict[str, str] = field(default_factory=dict)  # by kind, with the API server's sentence
    refused_with: int = 403
    goes_when_asked: tuple[str, str] | None = None  # what somebody deletes just then

    def add(self, manifest: Any, **metadata: Any) -> Object:
        """Make the object exist, as anybody but the controller would."""
        made = self.put(manifest, **metadata)
        self.unseen.append(("MODIFIED", made))
        return made

    def remove(self, kind: str, name: str) -> None:
        """Delete the object, as anybody but the controller would."""
        self.unseen.append(("DELETED", self.objects.pop((kind, name))))

    def put(self, manifest: Any, **metadata: Any) -> Object:
        """Make the object exist. Of what the controller writes, no watch tells before a test ends."""
        made = copy.deepcopy(dict(manifest))
        version = str(next(self.versions))
        made["metadata"] = {"uid": f"uid-{version}", **made["metadata"], "resourceVersion": version, **metadata}
        self.objects[made["kind"], made["metadata"]["name"]] = made
        return made

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        self.requests.append(("get", kind))
        if self.goes_when_asked == (kind, name):
            self.objects.pop((kind, name), None)
        return self.objects.get((kind, name))

    async def apply(self, manifest: Any) -> Object:
        self._ask("apply", manifest["kind"])
        there = self.objects.get((manifest["kind"], manifest["metadata"]["name"]), {"metadata": {}})
        owners = {key: value for key, value in there["metadata"].items() if key == "ownerReferences"}
        return self.put({**manifest, "metadata": {**owners, **manifest["metadata"]}})

    def _ask(self, verb: str, kind: str) -> None:
        self.requests.append((verb, kind))
        if kind in self.refused:
            answer = {
                "status": self.refused_with,
                "reason": "Forbidden",
                "body": json.dumps({"message": self.refused[kind]}),
            }
            error: Any = SimpleNamespace(**answer)
            raise ApiRefused(f"{verb} {kind}", error)

    async def create(self, manifest: Any) -> Object | None:
        self._ask("create", manifest["kind"])
        exists = (manifest["kind"], manifest["metadata"]["name"]) in self.objects
        return None if exists else self.put(manifest)

    async def delete(self, kind: str, namespace: str, name: str, **same: str) -> None:
        self._ask("delete", kind)
        there = self.objects[kind, name]["metadata"]
        if all(there[key] == value for key, value in same.items()):
            del self.objects[kind, name]

    async def apply_status(self, job: Any, status: Any) -> Object | None:
        self.requests.append(("apply", "status"))
        there = self.objects[job["kind"], job["metadata"]["name"]]
        if there["metadata"]["uid"] != job["metadata"]["uid"]:
            return None
        JobStatus.model_validate(status)  # the definition's bounds: the API server would refuse more
        return self.put({**there, "status": status})

    async def patch_status(self, kind: str, namespace: str, name: str, patch: Any) -> None:
        self._ask("patch", f"status of {kind}")

    async def emit(self, job: Any, event: Any, *, at: str) -> None:
        self.events.append(event.reason)

    async def events_of(self, namespace: str, uid: str, reason: str) -> list[Object]:
        return []

    def written(self) -> list[str]:
        """The kinds of the children that were written."""
        return [kind for verb, kind in self.requests if verb in ("apply", "create") and kind != "status"]


@dataclass
class Life:
    """A job on that server, and the controller's passes over it."""

    server: Server
    store: Store
    reconciler: Reconciler

    async def one_pass(self) -> float | None:
        """Make a pass that knows what the watches have reported of others, and of its own writes what it remembers."""
        for change, body in self.server.unseen:
            labelled = names.LABEL_MANAGED_BY in body["metadata"].get("labels", {})
            if body["kind"] in WATCHED and (labelled or body["kind"] == names.KIND):
                (self.store.remove if change == "DELETED" else self.store.put)(body["kind"], body)
        self.server.unseen.clear()
        return await self.reconciler(KEY)

    def children_applied(self) -> tuple[str, str] | None:
        """The condition ChildrenApplied."""
        status = self.server.objects[names.KIND, KEY.name].get("status") or {}
        found = conditions.find(status, reasons.CHILDREN_APPLIED)
        return (found["status"], found["reason"]) if found else None


def reconciler(
    api: object, store: Store, *, capacity: Capacity | None = None, clock: Callable[[], datetime] = lambda: b.NOW
) -> Reconciler:
    """The passes of a controller with this store."""
    progress = ProgressPolls(cast("Any", None), lambda key: None, interval_s=b.SETTINGS.progress_s)  # no learner runs
    metrics = Metrics(store)
    account = capacity or Capacity(sees_nodes=False)
    return Reconciler(cast("Any", api), store, progress, b.SETTINGS, metrics=metrics, capacity=account, clock=clock)
