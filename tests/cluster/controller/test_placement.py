"""Many nodes, the real scheduler: a job gets one node for all of it, or nothing is created and the reason is told."""

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, eventually, job, phase, reason
from tests.cluster.controller.fake_nodes import FakeNodes

pytestmark = pytest.mark.timeout(300)


def node_of(kubectl: Kubectl, name: str) -> str | None:
    found: str | None = (kubectl.get("rmj", name) or {}).get("status", {}).get("node")
    return found


def message(kubectl: Kubectl, name: str) -> str:
    return str((kubectl.get("rmj", name) or {}).get("status", {}).get("message", ""))


def test_a_job_that_fits_nowhere_creates_nothing_and_starts_when_a_node_comes(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str
) -> None:
    kubectl("cordon", node)
    small = nodes.add(f"{kubectl.namespace}-small", gpus=3, labels=HERE)
    kubectl.apply(job())
    wanted = f"needs 4 nvidia.com/gpu on one node; the largest free is 3 on {small}"
    eventually(lambda: message(kubectl, "job-3v1") == wanted, why="the condition says what is missing")
    assert reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits"
    assert kubectl.list("deployments", "jobs", "services", "pods") == []
    large = nodes.add(f"{kubectl.namespace}-large", labels=HERE)
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the new node is used")
    eventually(lambda: node_of(kubectl, "job-3v1") == large, why="the status names it")


def test_jobs_that_come_at_once_never_share_room(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    kubectl("cordon", node)
    names = [nodes.add(f"{kubectl.namespace}-{index}", gpus=6, labels=HERE) for index in range(3)]
    jobs = [job(f"job-{index}") for index in range(5)]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": jobs})

    def places() -> list[str] | None:
        told = [reason(kubectl, f"job-{index}", "Placed") for index in range(5)]
        return [node_of(kubectl, f"job-{i}") or "" for i in range(5)] if all(told) else None

    found = eventually(places, why="every job is placed or told")
    placed = [name for name in found if name]
    assert sorted(placed) == sorted(names)
    assert len(kubectl.list("deployments")) == 3
    done, waiting = (next(i for i in range(5) if bool(found[i]) is wanted) for wanted in (True, False))
    kubectl("delete", "rmj", f"job-{done}")
    eventually(lambda: node_of(kubectl, f"job-{waiting}") or len(kubectl.list("deployments")) == 3, why="one follows")


def test_both_pods_of_a_job_are_bound_to_its_node(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    tight = nodes.add(f"{kubectl.namespace}-tight", gpus=4, labels=HERE)
    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    pod = eventually(lambda: kubelet.pod("job-3v1", "learner"), why="the learner's pod exists")
    eventually(lambda: (kubectl.get("pod", pod["metadata"]["name"]) or {})["spec"].get("nodeName"), why="it is bound")
    assert {item["spec"]["nodeName"] for item in kubectl.list("pods")} == {tight}


def test_the_whole_job_moves_when_its_node_is_deleted(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    first = nodes.add(f"{kubectl.namespace}-first", gpus=4, labels=HERE)
    kubectl.apply(job())
    kubelet.servers_answer("job-3v1")
    kubelet.learner_runs("job-3v1")
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="the job runs")
    assert node_of(kubectl, "job-3v1") == first
    nodes.remove(first)
    eventually(lambda: node_of(kubectl, "job-3v1") == node, why="the job has another node", timeout_s=90)
    events = {event["reason"] for event in kubectl.list("events") if event["involvedObject"]["name"] == "job-3v1"}
    assert "NodeLost" in events
    assert kubectl.get("job", "job-3v1-learner") is None


def test_a_higher_priority_takes_the_node_of_a_lower_one_and_the_lower_one_waits_as_a_whole(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    kubectl("cordon", node)
    nodes.add(f"{kubectl.namespace}-only", gpus=4, labels=HERE)
    urgent = f"{kubectl.namespace}-urgent"
    kubectl("create", "priorityclass", urgent, "--value=1000")
    try:
        kubectl.apply(job("low"))
        kubelet.servers_answer("low")
        kubelet.learner_runs("low")
        eventually(lambda: phase(kubectl, "low") == "Running", why="the first job runs")
        kubectl.apply(job("high", placement={"nodeSelector": HERE, "priorityClassName": urgent}))
        kubelet.servers_answer("high")
        kubelet.learner_runs("high")
        eventually(lambda: phase(kubectl, "high") == "Running", why="the urgent job runs", timeout_s=60)
        eventually(lambda: reason(kubectl, "low", "Placed") == "NoSingleNodeFits", why="the other waits", timeout_s=90)
        selector = "stage2.dev/job=low"
        eventually(
            lambda: kubectl.list("pods", selector=selector) == [],
            why="and holds no GPU",
        )
    finally:
        kubectl("delete", "priorityclass", urgent)
