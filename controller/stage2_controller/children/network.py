"""The network around a job: the Service of its servers, the EndpointSlices behind it, and the NetworkPolicy.

The controller writes the EndpointSlices itself: only pods that belong to the job, proved by their owners' uids, stand
behind the Service, and none that merely carries its labels. It reads only observed objects for that, because a running
job needs its servers even after its spec was edited into an invalid one. Pure.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any, Literal

from stage2_api.pod.layout import METRICS_PORT, PROGRESS_PORT
from stage2_api.vllm import Transport
from stage2_controller.children import comparison, manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.observed import Object, Observed, ended, terminating
from stage2_controller.spec import kinds, names
from stage2_controller.spec.containers import Container, Processes

CONTROLLER_LABELS = {names.LABEL_ROLE: "controller"}
"""Labels of the controller's pods, the same for every release of the chart."""
NAME_SERVER_PORTS = (53, 5353)
"""Ports of name servers: most use 53, OpenShift's pods 5353; a policy applies to the pod's own port."""
NODES = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "fc00::/7", "fe80::/10")
"""Where a node may run a name server of its own: private, shared and link-local addresses (RFC 1918, 6598, 3927, 4193,
4291)."""
_NAME_SERVERS = {
    "to": [{"namespaceSelector": {}}, *({"ipBlock": {"cidr": cidr}} for cidr in NODES)],
    "ports": [{"port": port, "protocol": protocol} for port in NAME_SERVER_PORTS for protocol in ("UDP", "TCP")],
}
_EVERY_PORT: tuple[Mapping[str, int], ...] = ({},)


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
    return bool(comparison.writes([child for child in children if child["kind"] == kinds.SERVICE.kind], observed))


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
    reference = comparison.controller_of(body)
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


def network_policy(
    owner: Owner,
    processes: Processes,
    *,
    transport: Transport,
    controller_namespace: str | None,
    closed: bool,
    spec_hash: str | None = None,
) -> Manifest:
    """Return NetworkPolicy `<job>-pods` over servers and learner alike.

    Servers and learner reach each other on the ports for HTTP and for weights. NCCL connects its members on ports that
    the kernel chooses, so with NCCL they reach each other on every TCP port. The learner's progress, which needs the
    token, is open to the controller, or to everybody where the controller runs outside the cluster. Its metrics, which
    hold nothing secret, are open to all pods of the cluster, because Prometheus may run in any namespace.

    closed: whether servers and learner may connect only to each other on those ports, and to name servers: pods of the
    cluster or hosts with private addresses.
    """
    shared = [_shared_ports(processes, transport)] if processes.servers else []
    spec = {
        "podSelector": {"matchLabels": {names.LABEL_JOB: names.short_name(owner.name)}},
        "policyTypes": ["Ingress"],
        "ingress": [
            *(_allow("from", _both(owner.name), ports) for ports in shared),
            _allow("from", _controller(controller_namespace), [{"port": PROGRESS_PORT}]),
            _allow("from", [{"namespaceSelector": {}}], [{"port": METRICS_PORT}]),
        ],
    }
    if closed:
        egress = [*(_allow("to", _both(owner.name), ports) for ports in shared), _NAME_SERVERS]
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return manifest.child(kinds.NETWORK_POLICY, owner, {"spec": spec}, spec_hash=spec_hash)


def _shared_ports(processes: Processes, transport: Transport) -> Sequence[Mapping[str, int]]:
    if transport == "nccl":
        return _EVERY_PORT
    answering = [server.port for server in processes.servers]
    return [{"port": port} for port in (*answering, *processes.learner.group_ports)]


def _allow(
    side: Literal["from", "to"], peers: Sequence[Mapping[str, Any]], ports: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    rule: dict[str, Any] = {"ports": [{**port, "protocol": "TCP"} for port in ports]}
    return {**rule, side: list(peers)} if peers else rule


def _both(job: str) -> list[dict[str, Any]]:
    roles = names.ROLE_LEARNER, names.ROLE_ROLLOUT
    return [{"podSelector": {"matchLabels": manifest.selector(job, role)}} for role in roles]


def _controller(namespace: str | None) -> list[dict[str, Any]]:
    if namespace is None:
        return []
    return [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": CONTROLLER_LABELS},
        }
    ]
