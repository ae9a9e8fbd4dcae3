"""Kueue's Workload of a whole job: two pod sets, servers and learner, for one host (kueue.x-k8s.io/v1beta2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_controller import conditions
from stage2_controller.children import manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.observed import Object, Observed, ended, running, succeeded, terminating
from stage2_controller.outcome import Outcome
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.queue.kueue import admitted, condition, holds
from stage2_controller.spec import kinds, names

# Reasons of PodsReady that Kueue's waitForPodsReady knows.
_WAITS_FOR_START, _STARTED = "WaitForStart", "Started"
_WAITS_FOR_RECOVERY, _RECOVERED = "WaitForRecovery", "Recovered"


def status_patch(
    found: Object | None, observed: Observed, outcome: Outcome | None, *, at: str
) -> dict[str, Any] | None:
    """Return what the Workload is to be told (a JSON merge patch of what was read); None if it says so already.

    As Kueue's own integrations do: the end of the job, whether its pods are ready, and, once an evicted job has no pods
    any more, that its quota is free.
    """
    if found is None:
        return None
    if outcome:
        return _patch(found, _true("Finished", "JobFinished", outcome.message), at=at)
    if not admitted(found):
        if not all(map(ended, observed.pods)):
            return None
        wanted = [_false("PodsReady", _WAITS_FOR_START, "the job has no pods")]
        reserves = holds(found, "QuotaReserved")
        if not (holds(found, "Evicted") and reserves):
            return _patch(found, *wanted, at=at)
        message = "the job was evicted and has no pods any more"
        wanted += [_false(kind, "Pending", message) for kind in ("QuotaReserved", "Admitted")]
        return _patch(found, *wanted, at=at, admission=None)
    return _patch(found, _pods_ready(found, observed), at=at)


def _pods_ready(found: Object, observed: Observed) -> dict[str, str]:
    """Return PodsReady of an admitted job: Kueue's timeouts for the start and for a recovery go by its reason."""
    known = (condition(found, "PodsReady") or {}).get("reason")
    recovers = known in (_WAITS_FOR_RECOVERY, _RECOVERED)
    learner = observed.pod(names.ROLE_LEARNER)
    if not terminating(learner) and (running(learner, names.ROLE_LEARNER) or succeeded(learner, names.ROLE_LEARNER)):
        return _true("PodsReady", _RECOVERED if recovers else _STARTED, "servers and learner run")
    if recovers or holds(found, "PodsReady"):
        return _false("PodsReady", _WAITS_FOR_RECOVERY, "the learner ran and does not run any more")
    return _false("PodsReady", _WAITS_FOR_START, "the learner does not run yet")


def _patch(found: Object, *wanted: dict[str, str], at: str, **more: Any) -> dict[str, Any] | None:
    """Return a patch of the version that was read: it replaces the whole list, and is refused for any other version."""
    known = {item["type"]: item for item in (found.get("status") or {}).get("conditions") or []}
    changed = [item for item in wanted if _differs(known.get(item["type"]), item)]
    if not changed:
        return None
    for item in changed:
        known[item["type"]] = {**item, "lastTransitionTime": at}
    version = {"resourceVersion": found["metadata"]["resourceVersion"]}
    return {"metadata": version, "status": {"conditions": list(known.values()), **more}}


def _differs(known: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Return whether a condition is told anew: of pods that are not ready Kueue's timeouts go by the reason, too."""
    if (known or {"status": "False"}).get("status") != wanted["status"]:
        return True
    not_ready = (wanted["type"], wanted["status"]) == ("PodsReady", "False")
    return known is not None and not_ready and known.get("reason") != wanted["reason"]


def _true(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": conditions.cut(message)}


def _false(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "False", "reason": reason, "message": message}


@dataclass(frozen=True)
class WorkloadInputs:
    """Everything that a job's Workload is built from.

    active: false while the job is suspended or its quota goes back. priority: of `kueue.priority`. deactivated: of
    `kueue.deactivated_mark`. spec_hash: the hash of the spec whose pods the pod sets are.
    """

    pod_sets: Sequence[Mapping[str, Any]]
    queue: str
    active: bool
    priority: Mapping[str, Any]
    deactivated: str | None
    spec_hash: str


def build_workload(owner: Owner, inputs: WorkloadInputs) -> Manifest:
    """Return Workload `<job>-quota`."""
    spec = {"queueName": inputs.queue, "active": inputs.active, "podSets": list(inputs.pod_sets), **inputs.priority}
    marks = {names.ANNOTATION_DEACTIVATED: inputs.deactivated} if inputs.deactivated is not None else {}
    return manifest.child(kinds.WORKLOAD, owner, {"spec": spec}, annotations=marks, spec_hash=inputs.spec_hash)


def pod_sets(templates: Mapping[str, Mapping[str, Any]], *, one_host: bool) -> list[Manifest]:
    """Return the pod sets of a job with these pod templates by role.

    one_host: whether Kueue finds the host for all pods, by the topology of a flavor. Otherwise the scheduler does, and
    any flavor will do.
    """
    sets = [_pod_set(role, template) for role, template in templates.items()]
    for pod_set in sets if one_host else ():
        # Kueue places a group together; a group has exactly two pod sets.
        group = {"podSetGroupName": "job"} if len(sets) > 1 else {}
        pod_set["topologyRequest"] = {"required": HOSTNAME, **group}
    return sets


def _pod_set(role: str, template: Mapping[str, Any]) -> Manifest:
    return {
        "name": role,
        "count": 1,
        "template": {"metadata": {"labels": template["metadata"]["labels"]}, "spec": template["spec"]},
    }
