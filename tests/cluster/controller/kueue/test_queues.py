"""Queues of the real Kueue as clusters have them: a default one, ranks of Kueue's own, and labels that change."""

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, eventually, job
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.queues import QUEUE, apply_queued, queue, quota_message, until_running

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(3, apart=True)]


def workloads(kubectl: Kubectl) -> list[str]:
    """The names of what asks for quota in the test's namespace."""
    return sorted(one["metadata"]["name"] for one in kubectl.list("workloads"))


def test_default_queue_conflict_is_reported_with_required_kueue_setting(
    kubectl: Kubectl, team: list[str], controller: Controller
) -> None:
    with queue(kubectl, f"{kubectl.namespace}-default", "default"):
        apply_queued(kubectl, "first")
        wanted = "RolloutMatchingJob.v1alpha1.stage2.dev to integrations.externalFrameworks"
        eventually(lambda: wanted in quota_message(kubectl, "first"), why="the job says so")
        assert len(workloads(kubectl)) == 2


def test_workload_priority_class_decides_order_in_queue(
    kubectl: Kubectl, team: list[str], controller: Controller, kubelet: Kubelet
) -> None:
    name = f"{kubectl.namespace}-urgent"
    apply_queued(kubectl, "first")
    until_running(kubectl, kubelet, "first")
    for waiting, labels in (("patient", {}), ("hasty", {"kueue.x-k8s.io/priority-class": name})):
        made = job(waiting, placement={"nodeSelector": HERE})
        made["metadata"]["labels"] = {QUEUE: "team", **labels}
        kubectl.apply(made)
    eventually(lambda: "does not exist" in quota_message(kubectl, "hasty"), why="its class is named")
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
    kubectl.apply({**kind, "value": 1000, "description": "x"})
    try:
        until_running(kubectl, kubelet, "hasty")  # it takes the place of the first, and the patient one waits on
        assert kubelet.pod("patient", "rollout") is None
    finally:
        kubectl("delete", "rmj", "--all", "--timeout=600s")
        kubectl("delete", "workloadpriorityclass", name)


def test_pending_job_moves_to_queue_of_its_new_label(
    kubectl: Kubectl, team: list[str], controller: Controller, nodes: FakeNodes, kubelet: Kubelet
) -> None:
    apply_queued(kubectl, "first")
    until_running(kubectl, kubelet, "first")
    apply_queued(kubectl, "second")
    eventually(lambda: "nvidia.com/gpu" in quota_message(kubectl, "second"), why="it waits")
    own = f"{kubectl.namespace}-other"
    pool = {**HERE, "pool": own}
    nodes.add(own, gpus=4, labels=pool)
    with queue(kubectl, own, "other", nodeLabels=pool):
        kubectl("label", "rmj", "second", f"{QUEUE}=other", "--overwrite")
        until_running(kubectl, kubelet, "second")
        kubectl("label", "rmj", "first", f"{QUEUE}-")
        apply_queued(kubectl, "third")
        eventually(lambda: quota_message(kubectl, "third"), why="it waits")
        kubectl("label", "rmj", "third", f"{QUEUE}-")
        eventually(lambda: "third-quota" not in workloads(kubectl), why="its place in the queue goes")
