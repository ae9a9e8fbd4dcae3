"""Every node is too small: pods are pending where something may make another node.

What an autoscaler would do the test does: it adds a node once the real scheduler has refused the pods.
"""

from pathlib import Path

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Object, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_placement import message, node_of, places, refused
from tests.cluster.controller.test_refusals import bound, gpus, neighbour

pytestmark = pytest.mark.in_turns(2, apart=True)

TYPE = "node.kubernetes.io/instance-type"


def hosts_and_types(kubectl: Kubectl) -> list[Object]:
    """What the servers' pod says of nodes."""
    (pod,) = kubectl.list("pods", selector="stage2.dev/role=rollout")
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term.keys() == {"matchExpressions"}, "no matchFields, which autoscalers refuse"
    expressions: list[Object] = term["matchExpressions"]
    return expressions


def gets_all(kubectl: Kubectl, nodes: FakeNodes, *, small: str) -> None:
    """The pods of a job wait for a node, the one that comes gets both, and the small one never had half."""
    eventually(lambda: refused(kubectl, "job-3v1"), why="the scheduler has refused both pods: an autoscaler acts")
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits", why="the status names the reason")
    made = nodes.add(f"{kubectl.namespace}-made", gpus=4, labels={**HERE, TYPE: "large"})
    live = "the node that was made has both pods"
    eventually(lambda: places(kubectl, "job-3v1") == [made] * 2 and node_of(kubectl, "job-3v1") == made, why=live)
    reported = [event["message"] for event in kubectl.list("events") if event["reason"] == "Scheduled"]
    assert not any(small in message for message in reported)


@pytest.mark.parametrize("word", ["true", "false"])
def test_pods_wait_for_new_node_only_if_nodes_may_come(
    kubectl: Kubectl, rights: Path, nodes: FakeNodes, tmp_path: Path, word: str
) -> None:
    small = nodes.add(f"{kubectl.namespace}-small", gpus=3, labels=HERE)
    busy = nodes.add(f"{kubectl.namespace}-busy", gpus=4, labels={**HERE, "eks.amazonaws.com/nodegroup": "gpus"})
    log = tmp_path / "controller.log"
    with Controller(rights, kubectl.namespace, log, f"--nodes-may-come={word}"):
        kubectl.apply(job("first"))
        eventually(lambda: places(kubectl, "first") == [busy] * 2, why="the first job has the node")
        kubectl.apply(job())
        eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits", why="the second has no place")
        if word == "false":
            assert places(kubectl, "job-3v1") == [], "though a node is only busy, and of a pool"
            return
        gets_all(kubectl, nodes, small=small)


def test_pods_wait_for_node_with_their_gpu_resource(kubectl: Kubectl, controller: Controller, nodes: FakeNodes) -> None:
    """A pool of none leaves no node whose label could tell of it."""
    nodes.add(f"{kubectl.namespace}-cpus", gpus=0, labels=HERE)
    kind = f"{kubectl.namespace}.example/gpu"
    kubectl.apply(job(gpuResource=kind))
    eventually(lambda: refused(kubectl, "job-3v1"), why="the scheduler has refused both pods: an autoscaler acts")
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits", why="the status names the reason")
    made = nodes.add(f"{kubectl.namespace}-made", gpus=4, resource=kind, labels=HERE)
    eventually(lambda: places(kubectl, "job-3v1") == [made] * 2, why="the node that comes has both pods")


def test_servers_do_not_preempt_neighbour_if_whole_job_would_not_fit(
    kubectl: Kubectl, rights: Path, nodes: FakeNodes, tmp_path: Path
) -> None:
    """The servers of an urgent job would fit once a neighbour is gone, and the whole job never."""
    pool = {"karpenter.sh/nodepool": "gpus", TYPE: "small"}
    small = nodes.add(f"{kubectl.namespace}-small", gpus=3, labels={**HERE, **pool})
    kubectl.apply(neighbour("there", small, container=gpus(3)))
    eventually(lambda: bound(kubectl, "there"), why="the neighbour has the node")
    urgent = f"{kubectl.namespace}-urgent"
    kubectl("create", "priorityclass", urgent, "--value=1000")
    controller = Controller(rights, kubectl.namespace, tmp_path / "controller.log")
    try:
        controller.start()
        kubectl.apply(job(placement={"nodeSelector": HERE, "priorityClassName": urgent}))
        eventually(lambda: refused(kubectl, "job-3v1"), why="the scheduler has refused both pods")
        assert hosts_and_types(kubectl) == [{"key": TYPE, "operator": "NotIn", "values": ["small"]}]
        assert "deletionTimestamp" not in (kubectl.get("pod", "there") or {})["metadata"]
        assert not [event for event in kubectl.list("events") if event["reason"] == "Preempted"]
    finally:
        controller.stop()
        kubectl("delete", "priorityclass", urgent)


@pytest.mark.parametrize("by", ["nodeSelector", "affinity"])
def test_host_bound_job_waits_for_its_host(
    kubectl: Kubectl, rights: Path, nodes: FakeNodes, tmp_path: Path, by: str
) -> None:
    busy = nodes.add(f"{kubectl.namespace}-busy", labels={**HERE, "eks.amazonaws.com/nodegroup": "gpus"})
    term = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [busy, "another"]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    placement = {
        "nodeSelector": {"nodeSelector": {**HERE, "kubernetes.io/hostname": busy}},
        "affinity": {"nodeSelector": HERE, "affinity": {"nodeAffinity": required}},
    }[by]
    with Controller(rights, kubectl.namespace, tmp_path / "controller.log"):
        kubectl.apply(job("first"))
        eventually(lambda: places(kubectl, "first") == [busy] * 2, why="the first job has the node")
        kubectl.apply(job("named", placement=placement))
        eventually(lambda: reason(kubectl, "named", "Placed") == "NoSingleNodeFits", why="it has no place")
        assert f"the largest free is 0 on {busy}" in message(kubectl, "named")
        kubectl("delete", "rmj", "first")
        eventually(lambda: places(kubectl, "named") == [busy] * 2, why="what is freed is taken")
