"""What pods hold of a node, by the account and by the real scheduler: what the one leaves, the other gives away."""

from typing import Any

import pytest

from stage2_controller.job.objects import pod_requests
from tests.cluster.controller.conftest import Kubectl, Object, eventually
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_refusals import SECURE

CPUS = 64  # of a node
SIDECAR = {"restartPolicy": "Always"}


def container(name: str, cpu: str) -> Object:
    """A container that asks for processors alone."""
    return {"name": name, "image": "x", "securityContext": SECURE, "resources": {"requests": {"cpu": cpu}}}


SIDE, GREEDY = {**container("side", "4"), **SIDECAR}, container("greedy", "8")
HELD: list[tuple[str, float, Object]] = [
    ("a sidecar before a greedy init container", 12, {"initContainers": [SIDE, GREEDY]}),
    ("a greedy init container before a sidecar", 8, {"initContainers": [GREEDY, SIDE]}),
    ("a limit of the whole pod", 1, {"resources": {"limits": {"cpu": "40"}}}),
    ("a request of the whole pod", 9, {"resources": {"requests": {"cpu": "9"}}}),
]


def create(kubectl: Kubectl, node: str, name: str, **spec: Any) -> None:
    """A pod for this node alone, which the scheduler binds or refuses."""
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    where = {"nodeSelector": {"kubernetes.io/hostname": node}, "automountServiceAccountToken": False}
    kubectl("create", "-f", "-", stdin={**body, "spec": {**where, "enableServiceLinks": False, **spec}})


def bound(kubectl: Kubectl, name: str) -> bool:
    """Whether the scheduler gave the pod its node, once it has judged."""

    def judged() -> str:
        reported = (kubectl.get("pod", name) or {}).get("status", {}).get("conditions", [])
        return next((str(item["status"]) for item in reported if item["type"] == "PodScheduled"), "")

    return bool(eventually(judged, why="the scheduler judges the pod") == "True")


def leaves_what_is_counted(kubectl: Kubectl, node: str, cpus: float) -> None:
    """The account counts so much, and the scheduler gives away the rest, and no more."""
    there = kubectl.get("pod", "there") or {}
    assert pod_requests(there["spec"])["cpu"] == cpus
    create(kubectl, node, "more", containers=[container("x", str(CPUS - cpus + 0.5))])
    assert not bound(kubectl, "more")
    create(kubectl, node, "rest", containers=[container("x", str(CPUS - cpus))])
    assert bound(kubectl, "rest")


@pytest.mark.parametrize(("cpus", "spec"), [row[1:] for row in HELD], ids=[row[0] for row in HELD])
def test_pod_requests_match_scheduler_accounting(kubectl: Kubectl, nodes: FakeNodes, cpus: float, spec: Object) -> None:
    node = nodes.add(f"{kubectl.namespace}-a")
    create(kubectl, node, "there", containers=[container("x", "1")], **spec)
    assert bound(kubectl, "there")
    leaves_what_is_counted(kubectl, node, cpus)
