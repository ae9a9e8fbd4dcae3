"""The network around a job: the Service of its servers and the NetworkPolicy. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stage2_api.pod.layout import METRICS_PORT, PROGRESS_PORT
from stage2_api.vllm import Transport
from stage2_controller.children import manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.job import kinds, names
from stage2_controller.job.containers import Container, Processes

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


def service(
    owner: Owner, servers: Sequence[Container], *, attempt: str | None = None, spec_hash: str | None = None
) -> Manifest:
    """Return ClusterIP Service `<job>-rollout` with one stable port for each server.

    It publishes addresses before they are ready. Readiness belongs to the whole pod: otherwise one crashed server would
    make its neighbours unreachable, and a restarted server could not receive weights. attempt: selects only the pods of
    this attempt, not those that an earlier one left on a node that does not answer.
    """
    ports = [
        {"name": server.name, "port": server.port, "targetPort": server.port, "protocol": "TCP"} for server in servers
    ]
    of_attempt = {names.LABEL_ATTEMPT: attempt} if attempt else {}
    spec = {
        "type": "ClusterIP",
        "selector": {**manifest.selector(owner.name, names.ROLE_ROLLOUT), **of_attempt},
        "publishNotReadyAddresses": True,
        "ports": ports,
    }
    return manifest.child(kinds.SERVICE, owner, {"spec": spec}, spec_hash=spec_hash)


def network_policy(
    owner: Owner,
    processes: Processes,
    *,
    transport: Transport,
    controller_namespace: str | None,
    closed: bool,
    several_learners: bool = False,
    spec_hash: str | None = None,
) -> Manifest:
    """Return NetworkPolicy `<job>-pods` over servers and learner alike.

    Servers and learner reach each other on the ports for HTTP and for weights. NCCL connects its members on ports that
    the kernel chooses, so with NCCL they reach each other on every TCP port. The learner's progress, which needs the
    token, is open to the controller, or to everybody where the controller runs outside the cluster. Its metrics, which
    hold nothing secret, are open to all pods of the cluster, because Prometheus may run in any namespace.

    several_learners: whether the learner has several pods, whose processes also meet on ports that nobody knows before.
    closed: whether servers and learner may connect only to each other on those ports, and to name servers: pods of the
    cluster or hosts with private addresses.
    """
    every = transport == "nccl" or several_learners
    shared = [_EVERY_PORT if every else _shared_ports(processes)] if processes.servers or several_learners else []
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


def _shared_ports(processes: Processes) -> Sequence[Mapping[str, int]]:
    answering = [server.port for server in processes.of_pod]
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
