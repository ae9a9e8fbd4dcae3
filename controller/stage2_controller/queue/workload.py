"""What the controller writes into Kueue: a Workload for the whole job, and conditions in the Workload's status.

The Workload (kueue.x-k8s.io/v1beta2) has one pod set for the servers and one for the learner, for one host.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_controller.children import manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.job import kinds, names
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.queue.kueue import admitted, condition, holds
from stage2_controller.state import conditions
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed, ended, running, terminating

# Reasons of PodsReady that Kueue's waitForPodsReady knows.
_WAITS_FOR_START, _STARTED = "WaitForStart", "Started"
_WAITS_FOR_RECOVERY, _RECOVERED = "WaitForRecovery", "Recovered"


def build_workload(
    owner: Owner, sets: Sequence[Mapping[str, Any]], queue: str, *, priority: Mapping[str, Any], spec_hash: str
) -> Manifest:
    """Return Workload `<job>-quota`.

    priority: from `kueue.priority`. spec_hash: the hash of the spec from which the pod sets are built.
    """
    spec = {"queueName": queue, "podSets": list(sets), **priority}
    return manifest.child(kinds.WORKLOAD, owner, {"spec": spec}, spec_hash=spec_hash)


def pod_sets(templates: Mapping[str, Mapping[str, Any]], *, one_host: bool) -> list[Manifest]:
    """Return the pod sets of a job with these pod templates by role.

    one_host: whether Kueue finds the host for all pods, by the topology of a flavor. Otherwise the scheduler does, and
    any flavor will do.
    """
    # Kueue places a group of pod sets together; a group has exactly two.
    group = {"podSetGroupName": "job"} if len(templates) > 1 else {}
    topology = {"topologyRequest": {"required": HOSTNAME, **group}} if one_host else {}
    return [
        {
            "name": role,
            "count": 1,
            "template": {"metadata": {"labels": template["metadata"]["labels"]}, "spec": template["spec"]},
            **topology,
        }
        for role, template in templates.items()
    ]


def status_patch(
    workload: Object | None, observed: Observed, *, end: Condition | None, at: str
) -> dict[str, Any] | None:
    """Return a JSON merge patch for the Workload's status, at the version that was read; None if nothing changes.

    end: Succeeded or Failed. Like Kueue's own integrations, the patch reports the end of the job, whether its pods are
    ready, and, once an evicted job has no pods any more, that its quota is free.
    """
    if workload is None:
        return None
    if end:
        return _patch(workload, _true("Finished", "JobFinished", end.message), at=at)
    if admitted(workload):
        return _patch(workload, _pods_ready(workload, observed), at=at)
    if not all(map(ended, observed.pods)):
        return None
    no_pods = _false("PodsReady", _WAITS_FOR_START, "the job has no pods")
    if not (holds(workload, "Evicted") and holds(workload, "QuotaReserved")):
        return _patch(workload, no_pods, at=at)
    message = "the job was evicted and has no pods left"
    freed = [_false(kind, "Pending", message) for kind in ("QuotaReserved", "Admitted")]
    return _patch(workload, no_pods, *freed, at=at, admission=None)


def _pods_ready(workload: Object, observed: Observed) -> dict[str, str]:
    """Return PodsReady of an admitted job; Kueue's time-outs for the start and for a recovery depend on its reason."""
    known = (condition(workload, "PodsReady") or {}).get("reason")
    recovers = known in (_WAITS_FOR_RECOVERY, _RECOVERED)
    learner = observed.pod(names.ROLE_LEARNER)
    if not terminating(learner) and running(learner, names.ROLE_LEARNER):
        return _true("PodsReady", _RECOVERED if recovers else _STARTED, "servers and learner run")
    if recovers or holds(workload, "PodsReady"):
        return _false("PodsReady", _WAITS_FOR_RECOVERY, "the learner has stopped running")
    return _false("PodsReady", _WAITS_FOR_START, "the learner does not run yet")


def _patch(workload: Object, *wanted: dict[str, str], at: str, **more: Any) -> dict[str, Any] | None:
    """Return a patch that replaces the whole list of conditions, and that the API server refuses for newer versions."""
    known = {item["type"]: item for item in (workload.get("status") or {}).get("conditions") or []}
    changed = [item for item in wanted if _differs(known.get(item["type"]), item)]
    if not changed:
        return None
    for item in changed:
        known[item["type"]] = {**item, "lastTransitionTime": at}
    version = {"resourceVersion": workload["metadata"]["resourceVersion"]}
    return {"metadata": version, "status": {"conditions": list(known.values()), **more}}


def _differs(known: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Return whether a condition has to be written: the reason counts too where pods are not ready."""
    if (known or {"status": "False"}).get("status") != wanted["status"]:
        return True
    not_ready = (wanted["type"], wanted["status"]) == ("PodsReady", "False")
    return known is not None and not_ready and known.get("reason") != wanted["reason"]


def _true(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": conditions.shorten(message)}


def _false(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "False", "reason": reason, "message": message}
