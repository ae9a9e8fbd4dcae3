"""The Service of the rollout pod, and the EndpointSlices behind it.

The controller writes the EndpointSlices itself: only pods that belong to the job, proved by their owners' uids, stand
behind the Service, and none that merely carries its labels. What it needs for that it reads from observed objects
alone, because a running job needs its servers even after its spec was edited into an invalid one. Pure.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from stage2_controller.children import diff, manifest, ownership
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.observed import Object, Observed, ended, terminating
from stage2_controller.spec import kinds, names
from stage2_controller.spec.containers import Container

SERVICE_LABEL = "kubernetes.io/service-name"
MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"  # Kubernetes' own controllers leave such a slice alone
_WRITTEN = ("addressType", "ports", "endpoints")


def service(owner: Owner, servers: Sequence[Container], *, spec_hash: str | None) -> Manifest:
    """Return ClusterIP Service `<job>-rollout` with one stable port for each server.

    It publishes addresses before they are ready. Readiness belongs to the whole pod: otherwise one crashed server would
    make its neighbours unreachable, and a restarted server could not receive the weights that make it ready. Without a
    controller the Service selects pods by their labels; with one it has no selector.
    """
    ports = [
        {"name": server.name, "port": server.port, "targetPort": server.port, "protocol": "TCP"} for server in servers
    ]
    spec = {
        "type": "ClusterIP",
        "selector": {} if owner.uid else manifest.selector(owner.name, names.ROLE_ROLLOUT),
        "publishNotReadyAddresses": True,
        "ports": ports,
    }
    return manifest.child(kinds.SERVICE, owner, {"spec": spec}, spec_hash=spec_hash)


def must_be_replaced(children: Sequence[Manifest], observed: Observed) -> bool:
    """Return whether the Service has to be deleted and created again: an older controller gave it a selector.

    Removing the selector would not be enough: the slices that Kubernetes wrote for it would stay.
    """
    existing = observed.service
    if existing is None or terminating(existing) or not existing["spec"].get("selector"):
        return False
    return bool(diff.writes([child for child in children if child["kind"] == kinds.SERVICE.kind], observed))


def slices_to_write(observed: Observed) -> tuple[Manifest, ...]:
    """Return the EndpointSlices that are missing or differ: one for each of the job's pods that has an address.

    There are none while the Deployment is being deleted, for each slice goes with its pod, nor where the Service has a
    selector because an older controller made it for pods that still run: Kubernetes writes the slices then.
    """
    service = observed.service
    if service is None or service["spec"].get("selector") or not service["spec"].get("ipFamilies"):
        return ()  # a Service without address families was changed to an external name: it is applied back first
    if observed.deployment is None or terminating(observed.deployment):
        return ()
    known = {slice_["metadata"]["name"]: slice_ for slice_ in observed.endpointslices}
    wanted = [(pod, endpoint_slice(pod, service)) for pod in _members(observed, observed.deployment)]
    return tuple(slice_ for pod, slice_ in wanted if _differs(slice_, known.get(pod["metadata"]["name"])))


def endpoint_slice(pod: Object, service: Object) -> Manifest:
    """Return EndpointSlice `<pod>` with the pod's address behind the Service, or none.

    The pod owns it, so that the garbage collector removes it with the pod, whether or not a controller runs then. The
    address counts as ready whatever the pod's own state is, as the Service demands.
    """
    metadata, job = pod["metadata"], service["metadata"]["annotations"][names.ANNOTATION_JOB]
    identity = {key: metadata[key] for key in ("name", "uid")}
    address = _address(pod, service)
    endpoint = {
        "addresses": [address],
        "conditions": {"ready": True},
        "nodeName": pod["spec"]["nodeName"],
        "targetRef": {"kind": kinds.POD.kind, "namespace": metadata["namespace"], **identity},
    }
    return {
        "apiVersion": kinds.ENDPOINT_SLICE.api_version,
        "kind": kinds.ENDPOINT_SLICE.kind,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {
                **manifest.labels(job, names.ROLE_ROLLOUT),
                SERVICE_LABEL: service["metadata"]["name"],
                MANAGER_LABEL: names.FIELD_MANAGER,
            },
            "annotations": {names.ANNOTATION_JOB: job},
            "ownerReferences": [{"apiVersion": kinds.POD.api_version, "kind": kinds.POD.kind, **identity}],
        },
        "addressType": service["spec"]["ipFamilies"][0],
        "ports": [
            {"name": port["name"], "port": port["targetPort"], "protocol": port["protocol"]}
            for port in service["spec"]["ports"]
        ],
        "endpoints": [endpoint] if address else [],
    }


def _members(observed: Observed, deployment: Object) -> list[Object]:
    """Return the rollout pods that have a node and whose ReplicaSet belongs to the job's own Deployment.

    A pod's labels and annotations prove nothing, since whoever creates a pod chooses them. Neither does an owner
    reference to something that does not exist: no ReplicaSet of the Deployment has that uid.
    """
    sets = [one for one in observed.replicasets if _controls(deployment, one)]
    return [pod for pod in observed.pods if pod["spec"].get("nodeName") and any(_controls(one, pod) for one in sets)]


def _controls(owner: Object, body: Object) -> bool:
    reference = ownership.controller_of(body)
    return reference is not None and reference["uid"] == owner["metadata"]["uid"]


def _address(pod: Object, service: Object) -> str | None:
    """Return the pod's address in the Service's address family; None where it has none yet or needs none any more."""
    status: Mapping[str, Any] = pod.get("status") or {}
    if terminating(pod) or ended(pod):  # by now another pod may have its address
        return None
    addresses = [one["ip"] for one in status.get("podIPs") or ()]
    family = service["spec"]["ipFamilies"][0]
    return next((one for one in addresses if f"IPv{ip_address(one).version}" == family), None)


def _differs(wanted: Manifest, existing: Object | None) -> bool:
    if existing is None:
        return bool(wanted["endpoints"])
    metadata = existing["metadata"]
    return (
        any((existing.get(key) or []) != wanted[key] for key in _WRITTEN)
        or not wanted["metadata"]["labels"].items() <= (metadata.get("labels") or {}).items()
        or metadata.get("ownerReferences") != wanted["metadata"]["ownerReferences"]
    )
