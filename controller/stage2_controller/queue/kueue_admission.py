"""What Kueue's admission of a job gives: the host, and what it adds to the pods of each role. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stage2_controller.observed import Object, Observed
from stage2_controller.place.node_fit import HOSTNAME

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
