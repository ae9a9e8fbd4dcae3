"""Kueue's Workload of a whole job: two pod sets, servers and learner, for one host (kueue.x-k8s.io/v1beta2)."""

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_controller.children import meta
from stage2_controller.place.node_fit import HOSTNAME
from stage2_controller.spec import kinds


def workload(
    owner: Mapping[str, Any],
    children: Sequence[Mapping[str, Any]],
    *,
    queue: str,
    active: bool,
    one_host: bool,
    rank: Mapping[str, Any],
    reserved: Sequence[Mapping[str, Any]] | None = None,
) -> meta.Manifest:
    """Return Workload `<job>-quota`: the pods of the children.

    active: not while the job is suspended, nor while its quota goes back. one_host: Kueue finds the host for all of
    them, by the topology of a flavor; else the scheduler does, and any flavor will do. rank: of `kueue.rank`. reserved:
    the pod sets for which Kueue holds quota; it refuses every write that has others, as after an upgrade.
    """
    pod_sets = _pod_sets(children, one_host=one_host) if reserved is None else list(reserved)
    spec: dict[str, Any] = {"queueName": queue, "active": active, "podSets": pod_sets, **rank}
    return meta.child(kinds.WORKLOAD, owner=owner, body={"spec": spec})


def _pod_sets(children: Sequence[Mapping[str, Any]], *, one_host: bool) -> list[dict[str, Any]]:
    pod_sets = [
        _pod_set(kinds.ROLE_OF_PODS[child["kind"]], child["spec"]["template"])
        for child in children
        if child["kind"] in kinds.ROLE_OF_PODS
    ]
    for pod_set in pod_sets if one_host else ():
        # Kueue's group: exactly two pod sets, placed together.
        group = {"podSetGroupName": "job"} if len(pod_sets) > 1 else {}
        pod_set["topologyRequest"] = {"required": HOSTNAME, **group}
    return pod_sets


def _pod_set(role: str, template: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": role,
        "count": 1,
        "template": {"metadata": {"labels": template["metadata"]["labels"]}, "spec": template["spec"]},
    }
