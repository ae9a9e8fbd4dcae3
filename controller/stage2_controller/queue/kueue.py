"""Kueue: the queue that a job names, what Kueue says of it in the job's Workload, and what follows. Pure.

A job that carries the label `kueue.x-k8s.io/queue-name` waits until Kueue admits its Workload (`queue.workload`).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from stage2_controller import conditions, reasons
from stage2_controller.conditions import Condition
from stage2_controller.observed import Object, Observed
from stage2_controller.place import binding
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.spec import names

_PLACED_BY_KUEUE = "kueue.x-k8s.io/podset-required-topology"


def host(found: Object | None) -> str | None:
    """Return the value of kubernetes.io/hostname on the node that Kueue assigned; None if it left the choice open.

    A Workload that asks for no host may be assigned two by a flavor that has a topology: then the scheduler finds one.
    """
    assigned = (assignment.get("topologyAssignment") or {} for assignment in _assignments(found))
    hosts = {_host(topology) for topology in assigned if HOSTNAME in topology.get("levels", [])}
    return hosts.pop() if len(hosts) == 1 else None


def _host(topology: Mapping[str, Any]) -> str:
    level = topology["levels"].index(HOSTNAME)
    values = topology["slices"][0]["valuesPerLevel"][level]
    if "universal" in values:
        return str(values["universal"])
    parts = values["individual"]
    return f"{parts.get('prefix', '')}{parts['roots'][0]}{parts.get('suffix', '')}"


def flavors_of(found: Object | None) -> tuple[str, ...]:
    """Return the names of the ResourceFlavors that Kueue assigned to the job."""
    assigned = (one.get("flavors") or {} for one in _assignments(found))
    return tuple(sorted({name for names_ in assigned for name in names_.values()}))


def additions(observed: Observed) -> dict[str, Any]:
    """Return what an admission adds to the pods of each role, as Kueue's own integrations do it.

    The flavors' node labels and tolerations, what admission checks ask for, and the mark of a pod that Kueue placed:
    without it Kueue would count the pod on its host a second time, as somebody else's.
    """
    updates = list(_updates(observed.workload))
    made = {}
    for assignment in _assignments(observed.workload):
        parts = [*_flavor_parts(assignment, observed.flavors)]
        parts += [update for update in updates if update["name"] == assignment["name"]]
        if assignment.get("topologyAssignment"):
            parts.append({"annotations": {_PLACED_BY_KUEUE: HOSTNAME}})
        if added := _together(parts):
            made[assignment["name"]] = added
    return made


def _assignments(found: Object | None) -> Sequence[Mapping[str, Any]]:
    """Return what Kueue has assigned to each pod set of an admitted Workload."""
    admission = ((found or {}).get("status") or {}).get("admission") or {}
    assignments: Sequence[Mapping[str, Any]] = admission.get("podSetAssignments", [])
    return assignments


def _updates(found: Object | None) -> Iterator[Mapping[str, Any]]:
    """Yield what admission checks ask to add to a pod set."""
    for check in ((found or {}).get("status") or {}).get("admissionChecks") or ():
        yield from check.get("podSetUpdates") or ()


def _flavor_parts(assignment: Mapping[str, Any], flavors: Mapping[str, Object]) -> Iterator[Mapping[str, Any]]:
    """Yield the node labels and tolerations of the flavors that a pod set was assigned."""
    for name in sorted(set((assignment.get("flavors") or {}).values())):
        if name in flavors:
            spec = flavors[name].get("spec") or {}
            yield {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}


def _together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for part in parts:
        for key in ("labels", "annotations", "nodeSelector"):
            if part.get(key):
                made[key] = {**made.get(key, {}), **part[key]}
        if part.get("tolerations"):
            known = made.get("tolerations", [])
            made["tolerations"] = [*known, *(item for item in part["tolerations"] if item not in known)]
    return made


HOST_IN_VAIN_S = 60.0
"""How long after its admission a job waits for the host that Kueue assigned. Where that is of no use then, or later,
its quota goes back at once, and Kueue looks for another one."""
QUEUE_LABEL = names.LABEL_QUEUE
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
CLASS_AGAIN_S = 15.0
"""How often a WorkloadPriorityClass that does not exist is looked for: no watch tells of it."""
_GROUPS = {"PriorityClass": "scheduling.k8s.io", "WorkloadPriorityClass": "kueue.x-k8s.io"}
_BY_KUEUE = "DeactivatedDueTo"  # how the reason of an eviction begins that Kueue itself has decided for good
_NO_TOPOLOGY = "does not support TopologyAwareScheduling"
_RESET = "Reset to Pending after eviction"  # how the message of a check begins that forgets what it said


def priority_name(raw: Object) -> str | None:
    """Return the WorkloadPriorityClass that a job in a queue names: its rank there, and none of its pods'."""
    labels = raw["metadata"].get("labels") or {}
    return (labels.get(PRIORITY_LABEL) or None) if queue_name(raw) else None


def queue_name(raw: Object) -> str | None:
    """Return the LocalQueue that the job names."""
    return (raw["metadata"].get("labels") or {}).get(QUEUE_LABEL) or None


def priority(observed: Observed, priority_class: Object | None) -> dict[str, Any]:
    """Return what a job's Workload says of its priority in the queue: once there is one, what it has said before.

    priority_class: that of the job's pods, which counts where it names no WorkloadPriorityClass.
    """
    if observed.workload is not None:
        said = observed.workload["spec"]
        return {key: said[key] for key in ("priority", "priorityClassRef") if said.get("priorityClassRef")}
    for kind, found in (("WorkloadPriorityClass", observed.priority_class), ("PriorityClass", priority_class)):
        if found is not None:
            ref = {"group": _GROUPS[kind], "kind": kind, "name": found["metadata"]["name"]}
            return {"priority": found["value"], "priorityClassRef": ref}
    return {}


Named = TypeVar("Named", str, None)


def queue_of(found: Object | None, named: Named) -> str | Named:
    """Return the queue that the Workload is to name: the job's label may change until quota is reserved."""
    return str(found["spec"]["queueName"]) if found is not None and holds(found, "QuotaReserved") else named


def reserved_pod_sets(found: Object | None) -> Sequence[Mapping[str, Any]] | None:
    """Return the pod sets for which Kueue holds quota; None where it holds none."""
    pod_sets: Sequence[Mapping[str, Any]] | None = found["spec"].get("podSets") if found else None
    return pod_sets if holds(found, "QuotaReserved") else None


def of_another_spec(found: Object | None, spec_hash: str) -> bool:
    """Return whether the Workload asks for the pods of another spec."""
    return asked_for(found, spec_hash) != spec_hash


def asked_for(found: Object | None, spec_hash: str) -> str:
    """Return the hash of the spec whose pods the Workload asks for; one of before that was noted is of this one."""
    annotations: Mapping[str, str] = (found["metadata"].get("annotations") if found else None) or {}
    return annotations.get(names.ANNOTATION_SPEC_HASH, spec_hash)


def admitted(found: Object | None) -> bool:
    """Return whether the job may have pods."""
    return holds(found, "Admitted") and not holds(found, "Evicted")


def in_vain(found: Object | None, now: datetime) -> bool:
    """Return whether the job was given a host so long ago that it should have its place there."""
    told = condition(found, "Admitted")
    if told is None or host(found) is None:
        return False
    return (now - conditions.instant(told["lastTransitionTime"])).total_seconds() >= HOST_IN_VAIN_S


def gives_back(found: Object | None) -> bool:
    """Return whether quota that goes back has not gone yet: Kueue has evicted the Workload that was made inactive."""
    inactive = found is not None and not found["spec"].get("active", True)
    return inactive and holds(found, "Evicted") and holds(found, "QuotaReserved")


def turned_away(found: Object | None) -> bool:
    """Return whether Kueue itself has deactivated the Workload: a check rejected it, or it was requeued too often."""
    if found is None or found["spec"].get("active", True):
        return False
    reason = str((condition(found, "Evicted") or {}).get("reason", ""))
    return holds(found, "DeactivationTarget") or (holds(found, "Evicted") and reason.startswith(_BY_KUEUE))


def deactivated_by_others(found: Object | None) -> bool:
    """Return whether the Workload is inactive, and not by the controller: a person or Kueue has deactivated it."""
    if found is None or found["spec"].get("active", True):
        return False
    return _mark(found) != "true"


def deactivated_mark(found: Object | None, *, by_us: bool) -> str | None:
    """Return the mark of a Workload: whether the controller made it inactive, and so may make it active again.

    Once written it stays: Kueue applies the metadata that it has read with each status that it writes, and so owns the
    mark too. An apply without it would remove nothing.
    """
    if not by_us and _mark(found) is None:
        return None
    return "true" if by_us else "false"


def _mark(found: Object | None) -> str | None:
    annotations: Mapping[str, str] = (found["metadata"].get("annotations") if found else None) or {}
    return annotations.get(names.ANNOTATION_DEACTIVATED)


def disabled(queue: str) -> Condition:
    """Return the job's condition QuotaReserved where the controller was told nothing of Kueue."""
    message = (
        f"the label {QUEUE_LABEL}={queue} asks for a queue of Kueue, and this controller does not serve Kueue: install"
        " the chart with --set controller.kueue=true, or remove the label"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.KUEUE_DISABLED, message)


def without_class(raw: Object, observed: Observed) -> Condition | None:
    """Return the job's condition QuotaReserved where it names a WorkloadPriorityClass that there is none of."""
    name = priority_name(raw)
    if name is None or observed.workload is not None or observed.priority_class is not None:
        return None
    message = (
        f"the label {PRIORITY_LABEL}={name} names a WorkloadPriorityClass that does not exist: make it, or change or"
        " remove the label"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.NO_PRIORITY_CLASS, message)


def left_behind(raw: Object, found: Object | None) -> bool:
    """Return whether a job that names no queue any more has a Workload that waits for quota."""
    return found is not None and queue_name(raw) is None and not holds(found, "QuotaReserved") and not finished(found)


def finished(found: Object | None) -> bool:
    """Return whether the Workload is one of a job that has ended: Kueue never admits it again."""
    return holds(found, "Finished")


def asked_anew(queue: str) -> Condition:
    """Return the job's condition QuotaReserved while the Workload of a run or spec before this one goes."""
    message = f"waits in queue {queue}: the Workload of what ran before goes first"
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_PENDING, message)


def inactive(found: Object, queue: str) -> Condition:
    """Return the job's condition QuotaReserved while a Workload waits that somebody has deactivated."""
    name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]
    patch = f'kubectl patch workload {name} -n {namespace} --type merge -p \'{{"spec":{{"active":true}}}}\''
    message = (
        f"waits in queue {queue}: somebody has deactivated its Workload {name}; make that active again ({patch}), or"
        " suspend the job and resume it"
    )
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.WORKLOAD_INACTIVE, message)


def reserved(observed: Observed, queue: str, before: Mapping[str, Any] | None) -> Condition:
    """Return the job's condition QuotaReserved.

    before: the one of the last pass. Kueue forgets what a check said as soon as it has acted on it.
    """
    found = observed.workload
    if admitted(found):
        message = "; ".join(filter(None, (f"Kueue admitted the job through {queue}", binding.taken_by_kueue(observed))))
        return Condition(reasons.QUOTA_RESERVED, "True", reasons.ADMITTED, message)
    known = before or {}
    if failed := _checks(found, "Retry", "Rejected"):
        return _waits(reasons.CHECK_FAILED, queue, failed)
    said = str(known.get("message")) if known.get("reason") == reasons.CHECK_FAILED else ""
    evicted = str((condition(found, "Evicted") or {}).get("message")) if holds(found, "Evicted") else ""
    if turned_away(found):
        if known.get("reason") == reasons.QUOTA_REFUSED:
            return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, str(known["message"]))
        message = "; ".join(filter(None, (f"Kueue turned the job away in queue {queue}: {evicted}", said)))
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, message)
    if evicted and said:
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.CHECK_FAILED, said)
    pending = _checks(found, "Pending") if holds(found, "QuotaReserved") and not evicted else ""
    asked = str((condition(found, "QuotaReserved") or {}).get("message") or "")
    return _waits(reasons.QUOTA_PENDING, queue, evicted or pending or asked or "Kueue has not answered yet")


def _waits(reason: str, queue: str, message: str) -> Condition:
    if _NO_TOPOLOGY in message:
        message = f"{message}; give the flavor a topologyName, or set spec.placement.mode to Scheduler"
    return Condition(reasons.QUOTA_RESERVED, "False", reason, f"waits in queue {queue}: {message}")


def _checks(found: Object | None, *states: str) -> str:
    """Return what the admission checks in these states say; empty where there is none."""
    listed = ((found or {}).get("status") or {}).get("admissionChecks") or ()
    told = [one for one in listed if one.get("state") in states and not one.get("message", "").startswith(_RESET)]
    return "; ".join(f"admission check {one['name']}: {one.get('message') or one['state']}" for one in told)


def holds(found: Object | None, kind: str) -> bool:
    """Return whether a condition of the Workload is true."""
    told = condition(found, kind)
    return told is not None and told["status"] == "True"


def condition(found: Object | None, kind: str) -> Mapping[str, Any] | None:
    """Return a condition of the Workload; None if there is no such one."""
    return conditions.find((found or {}).get("status") or {}, kind)
