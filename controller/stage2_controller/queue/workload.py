"""Kueue's Workload of a whole job: two pod sets, servers and learner, for one host (kueue.x-k8s.io/v1beta2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_controller.children import manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.spec import kinds, names


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


def workload(owner: Owner, inputs: WorkloadInputs) -> Manifest:
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
