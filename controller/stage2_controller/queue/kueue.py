"""Kueue: the queue that a job names, what Kueue reports in the job's Workload, and what follows from it. Pure.

A job with the label `kueue.x-k8s.io/queue-name` waits until Kueue admits its Workload (`queue.workload`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from stage2_controller.children.build import Additions
from stage2_controller.job import names
from stage2_controller.place import binding
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.state import conditions, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed

HOST_OVERDUE_S = 60.0
"""Seconds after its admission that a job waits for the assigned host. If the host cannot be used by then, or later, the
Workload is replaced, and Kueue looks for another host."""
CLASS_AGAIN_S = 15.0
"""Seconds between checks for a missing WorkloadPriorityClass; the controller does not watch them."""
QUEUE_LABEL = names.LABEL_QUEUE
PRIORITY_LABEL = names.LABEL_PRIORITY
_PLACED_BY_KUEUE = "kueue.x-k8s.io/podset-required-topology"
_GROUPS = {"PriorityClass": "scheduling.k8s.io", "WorkloadPriorityClass": "kueue.x-k8s.io"}
_BY_KUEUE = "DeactivatedDueTo"  # prefix of an eviction's reason where Kueue itself gave the job up
_NO_TOPOLOGY = "does not support TopologyAwareScheduling"
_RESET = "Reset to Pending after eviction"  # prefix of a check's message that replaces what the check reported

Named = TypeVar("Named", str, None)


@dataclass(frozen=True)
class Admission:
    """Whether the job has quota. Only `plan` creates one, so no later step can run before that is known."""

    condition: Condition | None  # QuotaReserved; None: the job needs no quota
    additions: Additions  # what Kueue's admission adds to the pods

    @property
    def granted(self) -> bool:
        """Whether no quota is missing."""
        return self.condition is None or self.condition.status == "True"

    @property
    def lacks_class(self) -> bool:
        """Whether the job names a WorkloadPriorityClass that does not exist."""
        return self.condition is not None and self.condition.reason == reasons.NO_PRIORITY_CLASS


# --- The job's labels.


def queue_name(raw: Object) -> str | None:
    """Return the LocalQueue that the job names."""
    return (raw["metadata"].get("labels") or {}).get(QUEUE_LABEL) or None


def priority_name(raw: Object) -> str | None:
    """Return the WorkloadPriorityClass that a job in a queue names: its rank in the queue, not its pods' priority."""
    labels = raw["metadata"].get("labels") or {}
    return (labels.get(PRIORITY_LABEL) or None) if queue_name(raw) else None


def priority(observed: Observed, priority_class: Object | None) -> dict[str, Any]:
    """Return the fields of the Workload's spec about its priority; those of an existing Workload stay.

    priority_class: that of the job's pods, which counts where the job names no WorkloadPriorityClass.
    """
    if observed.workload is not None:
        spec = observed.workload["spec"]
        return {key: spec[key] for key in ("priority", "priorityClassRef") if spec.get("priorityClassRef")}
    for kind, found in (("WorkloadPriorityClass", observed.priority_class), ("PriorityClass", priority_class)):
        if found is not None:
            ref = {"group": _GROUPS[kind], "kind": kind, "name": found["metadata"]["name"]}
            return {"priority": found["value"], "priorityClassRef": ref}
    return {}


# --- Kueue's admission: the host, and additions to the pods.


def host(workload: Object | None) -> str | None:
    """Return the value of kubernetes.io/hostname on the node that Kueue assigned; None if it assigned no single one.

    A flavor with a topology may assign two hosts to a Workload that requested none. Then the scheduler finds one.
    """
    assigned = (assignment.get("topologyAssignment") or {} for assignment in _assignments(workload))
    hosts = {_host(topology) for topology in assigned if HOSTNAME in topology.get("levels", [])}
    return hosts.pop() if len(hosts) == 1 else None


def _host(topology: Mapping[str, Any]) -> str:
    level = topology["levels"].index(HOSTNAME)
    values = topology["slices"][0]["valuesPerLevel"][level]
    if "universal" in values:
        return str(values["universal"])
    parts = values["individual"]
    return f"{parts.get('prefix', '')}{parts['roots'][0]}{parts.get('suffix', '')}"


def flavors_of(workload: Object | None) -> tuple[str, ...]:
    """Return the names of the ResourceFlavors that Kueue assigned to the job."""
    flavors = (assignment.get("flavors") or {} for assignment in _assignments(workload))
    return tuple(sorted({name for by_resource in flavors for name in by_resource.values()}))


def additions(observed: Observed) -> dict[str, Any]:
    """Return what an admission adds to the pods of each role, as in Kueue's own integrations.

    It adds the flavors' node labels and tolerations, what admission checks ask for, and the mark of a pod that Kueue
    placed. Without that mark Kueue would count the pod a second time on its host, as a pod of somebody else.
    """
    status = (observed.workload or {}).get("status") or {}
    updates = [one for check in status.get("admissionChecks") or () for one in check.get("podSetUpdates") or ()]
    by_role = {}
    for assignment in _assignments(observed.workload):
        parts = [*_flavor_parts(assignment, observed.flavors)]
        parts += [update for update in updates if update["name"] == assignment["name"]]
        if assignment.get("topologyAssignment"):
            parts.append({"annotations": {_PLACED_BY_KUEUE: HOSTNAME}})
        if added := _merged(parts):
            by_role[assignment["name"]] = added
    return by_role


def _assignments(workload: Object | None) -> Sequence[Mapping[str, Any]]:
    """Return what Kueue assigned to each pod set of an admitted Workload."""
    admission = ((workload or {}).get("status") or {}).get("admission") or {}
    assignments: Sequence[Mapping[str, Any]] = admission.get("podSetAssignments", [])
    return assignments


def _flavor_parts(assignment: Mapping[str, Any], flavors: Mapping[str, Object]) -> Iterator[Mapping[str, Any]]:
    """Yield the node labels and tolerations of the flavors of a pod set."""
    for name in sorted(set((assignment.get("flavors") or {}).values())):
        if name in flavors:
            spec = flavors[name].get("spec") or {}
            yield {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for key in ("labels", "annotations", "nodeSelector"):
            if part.get(key):
                whole[key] = {**whole.get(key, {}), **part[key]}
        if part.get("tolerations"):
            known = whole.get("tolerations", [])
            whole["tolerations"] = [*known, *(item for item in part["tolerations"] if item not in known)]
    return whole


# --- The Workload's state.


def holds(workload: Object | None, kind: str) -> bool:
    """Return whether a condition of the Workload is true."""
    found = condition(workload, kind)
    return found is not None and found["status"] == "True"


def condition(workload: Object | None, kind: str) -> Mapping[str, Any] | None:
    """Return a condition of the Workload; None if it has no such condition."""
    return conditions.find((workload or {}).get("status") or {}, kind)


def admitted(workload: Object | None) -> bool:
    """Return whether the job may have pods."""
    return holds(workload, "Admitted") and not holds(workload, "Evicted")


def finished(workload: Object | None) -> bool:
    """Return whether the Workload reports the end of a job: Kueue never admits it again."""
    return holds(workload, "Finished")


def queue_of(workload: Object | None, named: Named) -> str | Named:
    """Return the queue for the Workload: a job's label may change it only until quota is reserved."""
    return str(workload["spec"]["queueName"]) if workload is not None and holds(workload, "QuotaReserved") else named


def reserved_pod_sets(workload: Object | None) -> Sequence[Mapping[str, Any]] | None:
    """Return the pod sets for which Kueue holds quota; None where it holds none.

    Kueue refuses every write with other pod sets then, such as those of a newer controller.
    """
    pod_sets: Sequence[Mapping[str, Any]] | None = workload["spec"].get("podSets") if workload else None
    return pod_sets if holds(workload, "QuotaReserved") else None


def spec_hash_of(workload: Object | None, spec_hash: str) -> str:
    """Return the hash of the spec that the Workload was built from; a Workload without one counts as this spec's."""
    annotations: Mapping[str, str] = (workload["metadata"].get("annotations") if workload else None) or {}
    return annotations.get(names.ANNOTATION_SPEC_HASH, spec_hash)


def host_overdue(workload: Object | None, now: datetime) -> bool:
    """Return whether Kueue assigned a host so long ago that the job should run there."""
    admission = condition(workload, "Admitted")
    if admission is None or host(workload) is None:
        return False
    return (now - conditions.instant(admission["lastTransitionTime"])).total_seconds() >= HOST_OVERDUE_S


def turned_away(workload: Object | None) -> bool:
    """Return whether Kueue itself has deactivated the Workload: a check rejected it, or it was requeued too often."""
    reason = str((condition(workload, "Evicted") or {}).get("reason", ""))
    by_kueue = holds(workload, "DeactivationTarget") or (holds(workload, "Evicted") and reason.startswith(_BY_KUEUE))
    return inactive(workload) and by_kueue


def inactive(workload: Object | None) -> bool:
    """Return whether a person, or Kueue, has deactivated the Workload. The controller never does."""
    return workload is not None and not workload["spec"].get("active", True)


def is_abandoned(raw: Object, workload: Object | None) -> bool:
    """Return whether a job that no longer names a queue has a Workload that waits for quota."""
    waits = workload is not None and not holds(workload, "QuotaReserved") and not finished(workload)
    return waits and queue_name(raw) is None


# --- The job's condition QuotaReserved.


def not_served(queue: str) -> Condition:
    """Return the condition of a job with a queue where the controller does not serve Kueue."""
    message = (
        f"the label {QUEUE_LABEL}={queue} asks for a queue of Kueue, and this controller does not serve Kueue: install"
        " the chart with --set controller.kueue=true, or remove the label"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.KUEUE_DISABLED, message)


def missing_class(raw: Object, observed: Observed) -> Condition | None:
    """Return the condition of a job whose WorkloadPriorityClass does not exist; None for any other job."""
    name = priority_name(raw)
    if name is None or observed.workload is not None or observed.priority_class is not None:
        return None
    message = (
        f"the label {PRIORITY_LABEL}={name} names a WorkloadPriorityClass that does not exist: create it, or change or"
        " remove the label"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.NO_PRIORITY_CLASS, message)


def waits_for_old_workload(queue: str) -> Condition:
    """Return the condition while the Workload of an earlier run or spec is being deleted."""
    message = f"waits in queue {queue}: its earlier Workload is deleted first"
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_PENDING, message)


def workload_inactive(workload: Object, queue: str) -> Condition:
    """Return the condition while a Workload waits that somebody has deactivated."""
    name, namespace = workload["metadata"]["name"], workload["metadata"]["namespace"]
    patch = f'kubectl patch workload {name} -n {namespace} --type merge -p \'{{"spec":{{"active":true}}}}\''
    message = (
        f"waits in queue {queue}: somebody deactivated its Workload {name}; activate it again ({patch}), or"
        " suspend the job and resume it"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.WORKLOAD_INACTIVE, message)


def quota_reserved(observed: Observed, queue: str, before: Mapping[str, Any] | None) -> Condition:
    """Return the condition from what the Workload reports.

    before: the condition of the last pass. Kueue drops a check's message as soon as it has acted on it.
    """
    workload, known = observed.workload, before or {}
    if admitted(workload):
        message = "; ".join(filter(None, (f"Kueue admitted the job through {queue}", binding.taken_by_kueue(observed))))
        return Condition(reasons.QUOTA_RESERVED, "True", reasons.ADMITTED, message)
    if failed := _checks(workload, "Retry", "Rejected"):
        return _waits(reasons.CHECK_FAILED, queue, failed)
    earlier = str(known.get("message")) if known.get("reason") == reasons.CHECK_FAILED else ""
    evicted = str((condition(workload, "Evicted") or {}).get("message")) if holds(workload, "Evicted") else ""
    if turned_away(workload):
        if known.get("reason") == reasons.QUOTA_REFUSED:
            return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, str(known["message"]))
        message = "; ".join(filter(None, (f"Kueue turned the job away in queue {queue}: {evicted}", earlier)))
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, message)
    if evicted and earlier:
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.CHECK_FAILED, earlier)
    pending = _checks(workload, "Pending") if holds(workload, "QuotaReserved") and not evicted else ""
    waits_for = str((condition(workload, "QuotaReserved") or {}).get("message") or "")
    return _waits(reasons.QUOTA_PENDING, queue, evicted or pending or waits_for or "Kueue has not answered yet")


def _waits(reason: str, queue: str, message: str) -> Condition:
    if _NO_TOPOLOGY in message:
        message = f"{message}; give the flavor a topologyName, or set spec.placement.mode to Scheduler"
    return Condition(reasons.QUOTA_RESERVED, "False", reason, f"waits in queue {queue}: {message}")


def _checks(workload: Object | None, *states: str) -> str:
    """Return the messages of the admission checks in these states; empty where there are none."""
    listed = ((workload or {}).get("status") or {}).get("admissionChecks") or ()
    checks = [one for one in listed if one.get("state") in states and not one.get("message", "").startswith(_RESET)]
    return "; ".join(f"admission check {one['name']}: {one.get('message') or one['state']}" for one in checks)
