"""A controller that serves one namespace sees what the pods of all others take of the nodes it chooses among."""

import json
import uuid
from collections.abc import Iterator

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Object, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes


@pytest.fixture
def neighbour(admin: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace that the controller does not serve."""
    made = Kubectl(admin.kubeconfig, f"stage2-test-{uuid.uuid4().hex[:8]}")
    made("create", "namespace", made.namespace)
    yield made
    made("delete", "pods", "--all", "--force", "--grace-period=0")
    made("delete", "namespace", made.namespace, "--wait=false")


@pytest.fixture
def node(kubectl: Kubectl, nodes: FakeNodes) -> str:
    """The only node: room for one job, if nobody else is there."""
    return nodes.add(f"{kubectl.namespace}-node", gpus=4, labels=HERE)


def test_pods_of_other_namespaces_count_as_used_room(
    kubectl: Kubectl, neighbour: Kubectl, node: str, controller: Controller
) -> None:
    eventually(lambda: neighbour.run("get", "serviceaccount", "default").returncode == 0, why="pods can be created")
    neighbour.apply(_pod("greedy", node))
    kubectl.apply(job())
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits", why="the job waits for room")
    reported = json.dumps((kubectl.get("rmj", "job-3v1") or {})["status"]["conditions"])
    assert "the largest free is 3" in reported, reported

    def places() -> list[str]:
        pods = [pod for pod in kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]]
        return [pod["spec"].get("nodeName", "") for pod in pods]

    eventually(lambda: places() == ["", ""], why="its pods are pending, for an autoscaler to see")
    neighbour("delete", "pod", "greedy", "--force", "--grace-period=0")
    eventually(lambda: places() == [node, node], why="the job has its place")


def _pod(name: str, node: str) -> Object:
    container = {"name": "x", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    spec = {"nodeName": node, "containers": [container], "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
