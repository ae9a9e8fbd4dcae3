"""Kueue: one Workload for a whole job, written by the controller itself, and what Kueue answers in it. Pure.

A job that carries the label `kueue.x-k8s.io/queue-name` waits until Kueue admits its Workload: two pod sets, rollout
and learner, that ask for one host together (kueue.x-k8s.io/v1beta2, topology-aware scheduling).
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from stage2_controller.job import binding, conditions, kinds, names, reasons
from stage2_controller.job.children import meta
from stage2_controller.job.conditions import Condition
from stage2_controller.job.node_fit import HOSTNAME
from stage2_controller.job.observed import Object, Observed, running, succeeded, terminating
from stage2_controller.job.outcome import Outcome

HOST_IN_VAIN_S = 60.0
"""How long a job waits for the host that Kueue assigned, before its quota goes back and Kueue looks for another one."""
QUEUE_LABEL = names.LABEL_QUEUE
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
CLASS_AGAIN_S = 15.0
"""How often a WorkloadPriorityClass that does not exist is looked for: no watch tells of it."""
_GROUPS = {"PriorityClass": "scheduling.k8s.io", "WorkloadPriorityClass": "kueue.x-k8s.io"}
_PLACED_BY_KUEUE = "kueue.x-k8s.io/podset-required-topology"
_BY_KUEUE = "DeactivatedDueTo"  # how the reason of an eviction begins that Kueue itself has decided for good
_NO_TOPOLOGY = "does not support TopologyAwareScheduling"
_RESET = "Reset to Pending after eviction"  # how the message of a check begins that forgets what it said
# Reasons of PodsReady that Kueue's waitForPodsReady knows.
_WAITS_FOR_START, _STARTED = "WaitForStart", "Started"
_WAITS_FOR_RECOVERY, _RECOVERED = "WaitForRecovery", "Recovered"


def priority_name(raw: Object) -> str | None:
    """Return the WorkloadPriorityClass that a job in a queue names: its rank there, and none of its pods'."""
    labels = raw["metadata"].get("labels") or {}
    return (labels.get(PRIORITY_LABEL) or None) if queue_name(raw) else None


def queue_name(raw: Object) -> str | None:
    """Return the LocalQueue that the job names."""
    return (raw["metadata"].get("labels") or {}).get(QUEUE_LABEL) or None


def workload(
    owner: Mapping[str, Any],
    children: Sequence[Mapping[str, Any]],
    *,
    queue: str,
    active: bool,
    one_host: bool,
    rank: Mapping[str, Any],
) -> meta.Manifest:
    """Return Workload `<job>-quota`: the pods of the children.

    active: not while the job is suspended, nor while its quota goes back. one_host: Kueue finds the host for all of
    them, by the topology of a flavor; else the scheduler does, and any flavor will do. rank: as `rank` returns it.
    """
    pod_sets = [
        _pod_set(kinds.ROLE_OF_PODS[child["kind"]], child["spec"]["template"])
        for child in children
        if child["kind"] in kinds.ROLE_OF_PODS
    ]
    for pod_set in pod_sets if one_host else ():
        # Kueue's group: exactly two pod sets, placed together.
        group = {"podSetGroupName": "job"} if len(pod_sets) > 1 else {}
        pod_set["topologyRequest"] = {"required": HOSTNAME, **group}
    spec: dict[str, Any] = {"queueName": queue, "active": active, "podSets": pod_sets, **rank}
    return meta.child(kinds.WORKLOAD, owner=owner, body={"spec": spec})


def rank(observed: Observed, priority_class: Object | None) -> dict[str, Any]:
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
    return str(found["spec"]["queueName"]) if found is not None and _holds(found, "QuotaReserved") else named


def admitted(found: Object | None) -> bool:
    """Return whether the job may have pods."""
    return _holds(found, "Admitted") and not _holds(found, "Evicted")


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


def in_vain(found: Object | None, now: datetime) -> bool:
    """Return whether the job was given a host so long ago that it should have its place there."""
    told = _condition(found, "Admitted")
    if told is None or host(found) is None:
        return False
    return (now - conditions.instant(told["lastTransitionTime"])).total_seconds() >= HOST_IN_VAIN_S


def gives_back(found: Object | None) -> bool:
    """Return whether quota that goes back has not gone yet: Kueue has evicted the Workload that was made inactive."""
    inactive = found is not None and not found["spec"].get("active", True)
    return inactive and _holds(found, "Evicted") and _holds(found, "QuotaReserved")


def turned_away(found: Object | None) -> bool:
    """Return whether Kueue itself has deactivated the Workload: a check rejected it, or it was requeued too often."""
    if found is None or found["spec"].get("active", True):
        return False
    reason = str((_condition(found, "Evicted") or {}).get("reason", ""))
    return _holds(found, "DeactivationTarget") or (_holds(found, "Evicted") and reason.startswith(_BY_KUEUE))


def deactivated_by_others(found: Object | None) -> bool:
    """Return whether the Workload is inactive, and not by the controller: a person or Kueue has deactivated it."""
    if found is None or found["spec"].get("active", True):
        return False
    return _mark(found) != "true"


def marked(manifest: meta.Manifest, found: Object | None, *, by_us: bool) -> meta.Manifest:
    """Return a Workload that says whether the controller made it inactive, and so may make it active again.

    A mark never goes: Kueue applies what it has read of the metadata with each status that it writes, and thereby owns
    the mark too, so that an apply that leaves it out removes nothing.
    """
    if not by_us and _mark(found) is None:
        return manifest
    annotations = {**manifest["metadata"]["annotations"], names.ANNOTATION_DEACTIVATED: "true" if by_us else "false"}
    return {**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}}


def _mark(found: Object | None) -> str | None:
    annotations: Mapping[str, str] = (found["metadata"].get("annotations") if found else None) or {}
    return annotations.get(names.ANNOTATION_DEACTIVATED)


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
    return found is not None and queue_name(raw) is None and not _holds(found, "QuotaReserved") and not finished(found)


def finished(found: Object | None) -> bool:
    """Return whether the Workload is one of a job that has ended: Kueue never admits it again."""
    return _holds(found, "Finished")


def asked_anew(queue: str) -> Condition:
    """Return the job's condition QuotaReserved while the Workload of its failed run goes."""
    message = f"waits in queue {queue}: the Workload of the run that failed goes first"
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
        message = "; ".join(filter(None, (f"Kueue admitted the job through {queue}", binding.taken(observed))))
        return Condition(reasons.QUOTA_RESERVED, "True", reasons.ADMITTED, message)
    known = before or {}
    if failed := _checks(found, "Retry", "Rejected"):
        return _waits(reasons.CHECK_FAILED, queue, failed)
    said = str(known.get("message")) if known.get("reason") == reasons.CHECK_FAILED else ""
    evicted = str((_condition(found, "Evicted") or {}).get("message")) if _holds(found, "Evicted") else ""
    if turned_away(found):
        if known.get("reason") == reasons.QUOTA_REFUSED:
            return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, str(known["message"]))
        message = "; ".join(filter(None, (f"Kueue turned the job away in queue {queue}: {evicted}", said)))
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_REFUSED, message)
    if evicted and said:
        return Condition(reasons.QUOTA_RESERVED, "False", reasons.CHECK_FAILED, said)
    pending = _checks(found, "Pending") if _holds(found, "QuotaReserved") and not evicted else ""
    asked = str((_condition(found, "QuotaReserved") or {}).get("message") or "")
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


def answer(found: Object | None, observed: Observed, outcome: Outcome | None, *, at: str) -> dict[str, Any] | None:
    """Return what the Workload is to be told (a JSON merge patch of what was read); None if it says so already.

    As Kueue's own integrations do: the end of the job, whether its pods are ready, and, once an evicted job has no pods
    any more, that its quota is free.
    """
    if found is None:
        return None
    if outcome:
        return _patch(found, _true("Finished", "JobFinished", outcome.message), at=at)
    if not admitted(found):
        if observed.pods:
            return None
        wanted = [_false("PodsReady", _WAITS_FOR_START, "the job has no pods")]
        reserves = _holds(found, "QuotaReserved")
        if not (_holds(found, "Evicted") and reserves):
            return _patch(found, *wanted, at=at)
        message = "the job was evicted and has no pods any more"
        wanted += [_false(kind, "Pending", message) for kind in ("QuotaReserved", "Admitted")]
        return _patch(found, *wanted, at=at, admission=None)
    return _patch(found, _pods_ready(found, observed), at=at)


def _pods_ready(found: Object, observed: Observed) -> dict[str, str]:
    """Return PodsReady of an admitted job: Kueue's timeouts for the start and for a recovery go by its reason."""
    known = (_condition(found, "PodsReady") or {}).get("reason")
    recovers = known in (_WAITS_FOR_RECOVERY, _RECOVERED)
    learner = observed.pod(names.ROLE_LEARNER)
    if not terminating(learner) and (running(learner, names.ROLE_LEARNER) or succeeded(learner, names.ROLE_LEARNER)):
        return _true("PodsReady", _RECOVERED if recovers else _STARTED, "servers and learner run")
    if recovers or _holds(found, "PodsReady"):
        return _false("PodsReady", _WAITS_FOR_RECOVERY, "the learner ran and does not run any more")
    return _false("PodsReady", _WAITS_FOR_START, "the learner does not run yet")


def _pod_set(role: str, template: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": role,
        "count": 1,
        "template": {"metadata": {"labels": template["metadata"]["labels"]}, "spec": template["spec"]},
    }


def _patch(found: Object, *wanted: dict[str, str], at: str, **more: Any) -> dict[str, Any] | None:
    """Return a patch of the version that was read: it replaces the whole list, and is refused for any other version."""
    known = {item["type"]: item for item in (found.get("status") or {}).get("conditions") or []}
    changed = [item for item in wanted if known.get(item["type"], {}).get("status", "False") != item["status"]]
    if not changed:
        return None
    for item in changed:
        known[item["type"]] = {**item, "lastTransitionTime": at}
    version = {"resourceVersion": found["metadata"]["resourceVersion"]}
    return {"metadata": version, "status": {"conditions": list(known.values()), **more}}


def _true(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "True", "reason": reason, "message": conditions.cut(message)}


def _false(kind: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "False", "reason": reason, "message": message}


def _holds(found: Object | None, kind: str) -> bool:
    told = _condition(found, kind)
    return told is not None and told["status"] == "True"


def _condition(found: Object | None, kind: str) -> Mapping[str, Any] | None:
    conditions = ((found or {}).get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind), None)
