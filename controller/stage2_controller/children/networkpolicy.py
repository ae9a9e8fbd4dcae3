"""The NetworkPolicy of a job: who may reach its pods, everybody else may not."""

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_controller import names
from stage2_controller.children import meta
from stage2_controller.containers import Container

CONTROLLER_LABELS = {"app.kubernetes.io/name": "stage2", "app.kubernetes.io/component": "controller"}


def networkpolicy(
    owner: Mapping[str, Any], servers: Sequence[Container], learner: Container, *, controller_namespace: str | None
) -> meta.Manifest:
    """NetworkPolicy `<job>-pods` over servers and learner alike.

    The servers' ports are open to the learner, the learner's group ports to the servers, and the learner's progress
    (which asks for the token) to the controller: to everybody where the controller runs outside the cluster. Its
    metrics, which hold nothing secret, are open to the cluster's pods: Prometheus may run in any namespace.
    """
    group = [port for name, port in learner.ports.items() if name.startswith("group-")]
    rules = [
        _allow(_role(owner["name"], names.ROLE_LEARNER), [server.port for server in servers]),
        _allow(_role(owner["name"], names.ROLE_ROLLOUT), group),
        _allow(_controller(controller_namespace), [names.PROGRESS_PORT]),
        _allow([{"namespaceSelector": {}}], [names.METRICS_PORT]),
    ]
    spec = {
        "podSelector": {"matchLabels": {names.LABEL_JOB: names.short_name(owner["name"])}},
        "policyTypes": ["Ingress"],
        "ingress": [rule for rule in rules if rule["ports"]],
    }
    return meta.child("networking.k8s.io/v1", "NetworkPolicy", owner=owner, role=names.ROLE_PODS, body={"spec": spec})


def _allow(peers: Sequence[Mapping[str, Any]], ports: Sequence[int]) -> dict[str, Any]:
    rule: dict[str, Any] = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    return {**rule, "from": list(peers)} if peers else rule


def _role(job: str, role: str) -> list[dict[str, Any]]:
    return [{"podSelector": {"matchLabels": meta.selector(job, role)}}]


def _controller(namespace: str | None) -> list[dict[str, Any]]:
    if namespace is None:
        return []
    return [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": CONTROLLER_LABELS},
        }
    ]
