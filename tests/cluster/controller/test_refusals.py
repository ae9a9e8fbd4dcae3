"""What the real scheduler refuses, and why: only a refusal that is about the node moves a job, and always all of it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Object, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_placement import SECURE, message, node_of, places

HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"
GPU = "nvidia.com/gpu"


SPREAD = {
    "metadata": {"labels": {"of": "spread"}},
    "spec": {
        "topologySpreadConstraints": [
            {
                "topologyKey": "rack",
                "maxSkew": 1,
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {"of": "spread"}},
                "nodeAffinityPolicy": "Ignore",  # else the one node to which a pod is tied were all there is
            }
        ]
    },
}


def neighbour(name: str, node: str, *, labels: Any = None, container: Any = None, **spec: Any) -> Object:
    """A pod of somebody else on a node, which the scheduler binds."""
    whole = {"name": "x", "image": "x", "securityContext": SECURE, **(container or {})}
    body = {"nodeSelector": {HOSTNAME: node}, "containers": [whole], **spec}
    metadata = {"name": name, "labels": labels or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def gpus(number: int) -> Object:
    return {"resources": {"limits": {GPU: str(number)}}}


def uids(kubectl: Kubectl, name: str) -> set[str]:
    """The identities of what has a job's pods."""
    found = kubectl.list("deployments", "jobs", selector=f"stage2.dev/job={name}")
    return {item["metadata"]["uid"] for item in found}


def bound(kubectl: Kubectl, name: str) -> bool:
    return "nodeName" in (kubectl.get("pod", name) or {"spec": {}})["spec"]


@pytest.fixture
def add(kubectl: Kubectl, nodes: FakeNodes) -> Callable[..., str]:
    """Adds a node for one job alone."""

    def added(of: str, name: str, number: int, **labels: str) -> str:
        return nodes.add(f"{kubectl.namespace}-{name}", gpus=number, labels={**HERE, "of": of, **labels})

    return added


def only(of: str, **spec: Any) -> Object:
    """A job for nodes of its own."""
    return job(of, placement={"nodeSelector": {**HERE, "of": of}}, **spec)


def claimed(claim: str) -> list[Object]:
    return [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": claim}}]


@pytest.fixture
def zonal(kubectl: Kubectl) -> Iterator[str]:
    """A claim that is bound to a volume of zone b."""
    name = f"{kubectl.namespace}-volume"
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    there = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": ["b"]}]}
    volume = {
        **spec,
        "capacity": {"storage": "1Gi"},
        "local": {"path": "/data"},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [there]}},
        "claimRef": {"namespace": kubectl.namespace, "name": "zonal"},
    }
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume})
    asked = {**spec, "volumeName": name, "resources": {"requests": {"storage": "1Gi"}}}
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "zonal"}, "spec": asked})
    bound_to = lambda: (kubectl.get("pvc", "zonal") or {}).get("status", {}).get("phase")  # noqa: E731
    eventually(lambda: bound_to() == "Bound", why="the claim is bound")
    yield "zonal"
    kubectl("delete", "persistentvolume", name, "--wait=false")


def test_only_refusals_about_node_move_jobs(
    kubectl: Kubectl, controller: Controller, add: Callable[..., str], zonal: str
) -> None:
    """Four jobs at a time, for the 15 s in which the scheduler may think better of it are the same for all.

    The fullest node is the first choice of each. The controller sees neither volumes nor the neighbours of a node.
    """
    for index in range(2):
        add("zonal", f"a-{index}", 4, **{ZONE: "a"})
    there = add("zonal", "b", 8, **{ZONE: "b"})
    crowded, quiet = add("spread", "crowded", 4, rack="one"), add("spread", "quiet", 8, rack="two")
    lonely, company = add("shunned", "lonely", 4), add("shunned", "company", 8)
    first, second = add("mistyped", "first", 4), add("mistyped", "second", 8)
    stage2s = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": {"app.kubernetes.io/managed-by": "stage2"}}}
    apart = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [stage2s]}}
    kubectl.apply(neighbour("hermit", lonely, affinity=apart))
    kubectl.apply(neighbour("one-of-them", crowded, labels={"of": "spread"}))
    eventually(
        lambda: bound(kubectl, "hermit") and bound(kubectl, "one-of-them"), why="the neighbours have their nodes"
    )

    jobs = [only("zonal", volumes=claimed(zonal)), only("shunned"), only("mistyped", volumes=claimed("mistyped"))]
    jobs.append(only("spread", rollout={"servers": 3, "template": SPREAD}, learner={"gpus": 1, "template": SPREAD}))
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": jobs})
    reported = 'persistentvolumeclaim "mistyped" not found'
    eventually(lambda: reported in message(kubectl, "mistyped"), why="the scheduler's sentence is the job's")
    before = uids(kubectl, "mistyped")
    assert (len(before), node_of(kubectl, "mistyped")) == (2, first)

    eventually(lambda: places(kubectl, "zonal") == [there] * 2, why="it left zone a at once")
    eventually(lambda: places(kubectl, "shunned") == [company] * 2, why="it left the hermit")
    eventually(lambda: places(kubectl, "spread") == [quiet] * 2, why="it left the rack of its like")
    events = [one for one in kubectl.list("events") if one["reason"] == "NodeFull"]
    sentences = {one["involvedObject"]["name"]: one["message"] for one in events}
    assert len(events) == 3, "once each: of zone a the other node was not tried, and the hermit's not again"
    assert "PersistentVolume's node affinity" in sentences["zonal"]
    assert "anti-affinity" in sentences["shunned"]
    assert f"node {lonely} does not take the job" in sentences["shunned"], "the fullest node is the first choice"
    assert "topology spread constraints" in sentences["spread"]

    assert uids(kubectl, "mistyped") == before, f"it stays, though {second} is free and the others moved meanwhile"
    assert reported in message(kubectl, "mistyped")
    assert reason(kubectl, "mistyped", "Placed") == "Unschedulable"


@pytest.fixture
def lowly(kubectl: Kubectl) -> Iterator[str]:
    """A PriorityClass below none."""
    name = f"{kubectl.namespace}-lowly"
    kubectl("create", "priorityclass", name, "--value=-10")
    yield name
    kubectl("delete", "priorityclass", name)


def test_pods_with_negative_priority_are_preempted_and_pod_level_requests_count(
    kubectl: Kubectl, controller: Controller, add: Callable[..., str], lowly: str
) -> None:
    """A node of 64 cores, of which a neighbour takes 60 by `spec.resources` of its pod, has none for a learner of 8."""
    taken = add("lowly", "taken", 4)
    full, empty = add("greedy", "full", 4), add("greedy", "empty", 8)
    kubectl.apply(neighbour("filler", taken, container=gpus(4), priorityClassName=lowly))
    kubectl.apply(neighbour("greedy", full, resources={"requests": {"cpu": "60"}, "limits": {"cpu": "60"}}))
    eventually(lambda: bound(kubectl, "filler") and bound(kubectl, "greedy"), why="the neighbours are there")

    learner = {"gpus": 1, "resources": {"requests": {"cpu": "8"}}}
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": [only("lowly"), only("greedy", learner=learner)]})
    eventually(lambda: places(kubectl, "greedy") == [empty] * 2, why="the job has its node")
    eventually(lambda: places(kubectl, "lowly") == [taken] * 2, why="the filler made way for both pods")
    eventually(lambda: kubectl.get("pod", "filler") is None, why="it is gone")
    assert not [one for one in kubectl.list("events") if one["reason"] == "NodeFull"], "nothing was tried in vain"
