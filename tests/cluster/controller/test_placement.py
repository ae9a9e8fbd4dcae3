"""Many nodes, the real scheduler: a job gets one node for all of it, or nothing is created and it says why."""

from collections.abc import Iterator

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes

pytestmark = pytest.mark.in_turns(2, apart=True)


def node_of(kubectl: Kubectl, name: str) -> str | None:
    found: str | None = (kubectl.get("rmj", name) or {}).get("status", {}).get("node")
    return found


def message(kubectl: Kubectl, name: str) -> str:
    """What the job says first, which is what its condition Training says, beside what to look at."""
    status = (kubectl.get("rmj", name) or {}).get("status", {})
    top_message = str(status.get("message", ""))
    reported = [one for one in status.get("conditions", []) if one["type"] == "Training" and one["status"] == "False"]
    assert all(top_message in one["message"] for one in reported), status
    return top_message


def test_pending_pods_avoid_small_nodes_and_start_when_node_is_added(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str
) -> None:
    kubectl("cordon", node)
    small = nodes.add(f"{kubectl.namespace}-small", gpus=3, labels=HERE)
    kubectl.apply(job())
    wanted = f"needs 4 nvidia.com/gpu on one node; the largest free is 3 on {small}"
    eventually(lambda: message(kubectl, "job-3v1") == wanted, why="the condition says what is missing")
    assert reason(kubectl, "job-3v1", "Placed") == "NoSingleNodeFits"
    eventually(lambda: refused(kubectl, "job-3v1"), why="the small node has room for the servers and gets nothing")
    large = nodes.add(f"{kubectl.namespace}-large", labels=HERE)
    eventually(lambda: places(kubectl, "job-3v1") == [large] * 2, why="the new node is used")
    eventually(lambda: node_of(kubectl, "job-3v1") == large, why="the status names it")


def test_whole_job_goes_to_new_node_and_never_partly_to_fuller_one(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    """The first job leaves 12 of 16 GPUs: room for the servers of the second, and not for its learner."""
    kubectl.apply(job("first"))
    kubelet.servers_answer("first")
    kubectl.apply(job("large", rollout={"servers": 12}))
    pod = eventually(lambda: kubelet.pod("large", "learner"), why="its pods are pending, for an autoscaler to see")
    eventually(lambda: reason(kubectl, "large", "Placed") == "NoSingleNodeFits", why="the job says what is missing")
    eventually(lambda: refused(kubectl, "large"), why="the scheduler has looked at them")
    assert not any(pod["spec"].get("nodeName") for pod in kubectl.list("pods", selector="stage2.dev/job=large"))
    assert pod["spec"]["affinity"].keys() == {"podAffinity"}
    larger = nodes.add(f"{kubectl.namespace}-larger", gpus=13, labels=HERE)

    def places() -> list[str]:
        pods = kubectl.list("pods", selector="stage2.dev/job=large")
        return [pod["spec"].get("nodeName", "") for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    eventually(lambda: places() == [larger] * 2 and node_of(kubectl, "large") == larger, why="both are there")


def refused(kubectl: Kubectl, name: str) -> bool:
    """Whether the scheduler has refused both pods of a job."""
    pods = kubectl.list("pods", selector=f"stage2.dev/job={name}")
    reported = [item for pod in pods for item in pod["status"].get("conditions", []) if item["type"] == "PodScheduled"]
    return [item["status"] for item in reported] == ["False", "False"]


def test_job_made_too_large_by_admission_gives_back_its_node(
    kubectl: Kubectl, controller: Controller, node: str, kubelet: Kubelet, boxed: str
) -> None:
    """On 512 GiB: containers of 100 GiB by the namespace's LimitRange, pods of 120 GiB more by a RuntimeClass."""
    template = {"spec": {"runtimeClassName": boxed}}
    kubectl.apply(job("boxed", learner={"gpus": 1, "template": template}))
    eventually(lambda: reason(kubectl, "boxed", "Placed") == "HalfPlaced", why="half of it got the node")
    assert "Insufficient memory" in message(kubectl, "boxed")
    eventually(lambda: not any(places(kubectl, "boxed")), why="and gave it back")
    kubectl.apply(job("plain"))
    kubelet.servers_answer("plain")
    eventually(lambda: places(kubectl, "plain") == [node] * 2, why="without the box a job fits")


@pytest.fixture
def boxed(kubectl: Kubectl) -> Iterator[str]:
    """A RuntimeClass with an overhead, and a LimitRange in the test's namespace."""
    name = f"{kubectl.namespace}-boxed"
    overhead = {"podFixed": {"memory": "120Gi"}}
    made = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": "boxed"}
    kubectl.apply({**made, "overhead": overhead})
    item = {"type": "Container", "defaultRequest": {"memory": "100Gi"}}
    limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "usual"}, "spec": {"limits": [item]}}
    kubectl.apply(limits)
    yield name
    kubectl("delete", "runtimeclass", name)


def places(kubectl: Kubectl, name: str) -> list[str]:
    """The nodes of a job's pods."""
    return [pod["spec"].get("nodeName", "") for pod in kubectl.list("pods", selector=f"stage2.dev/job={name}")]


def test_tolerations_allow_tainted_node(kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str) -> None:
    """The scheduler has the last word: both pods have them."""
    kubectl("cordon", node)
    own = {"key": "stage2.dev/team", "value": kubectl.namespace, "effect": "NoSchedule"}
    tainted = nodes.add(f"{kubectl.namespace}-tainted", gpus=4, labels=HERE, taints=[own])
    kubectl.apply(job())
    eventually(lambda: "no node may be used" in message(kubectl, "job-3v1"), why="without them it has no place")
    kubectl("delete", "rmj", "job-3v1", "--timeout=600s")
    tolerations = [{"key": "stage2.dev/team", "operator": "Equal", "value": kubectl.namespace}]
    kubectl.apply(job(placement={"nodeSelector": HERE, "tolerations": tolerations}))
    eventually(lambda: places(kubectl, "job-3v1") == [tainted] * 2, why="both pods are there")


def test_node_affinity_applies_to_controller_and_scheduler(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    """A fuller node that it excludes, and an emptier one that it prefers among those that it takes."""
    nodes.add(f"{kubectl.namespace}-old", gpus=4, labels={**HERE, "gpu": "a100"})
    wanted = nodes.add(f"{kubectl.namespace}-wanted", gpus=32, labels={**HERE, "gpu": "h200"})
    old = {"key": "gpu", "operator": "NotIn", "values": ["a100"]}
    new = {"key": "gpu", "operator": "In", "values": ["h200"]}
    affinity = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [old]}]},
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchExpressions": [new]}}],
    }
    kubectl.apply(job(placement={"nodeSelector": HERE, "affinity": {"nodeAffinity": affinity}}))
    kubelet.servers_answer("job-3v1")
    eventually(lambda: places(kubectl, "job-3v1") == [wanted] * 2, why="both pods are there")


def test_neighbour_cannot_take_learner_gpu_while_learner_waits_or_restarts(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    tight = nodes.add(f"{kubectl.namespace}-tight", gpus=4, labels=HERE)
    kubectl.apply(job())
    kubelet.servers_answer("job-3v1", ready=False)
    kubelet.learner_waits("job-3v1")
    container = {"name": "x", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "1"}}, "securityContext": SECURE}
    spec = {"nodeSelector": {"kubernetes.io/hostname": tight}, "containers": [container]}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "neighbour"}, "spec": spec})

    def reported() -> str:
        conditions = (kubectl.get("pod", "neighbour") or {})["status"].get("conditions", [])
        return next((item.get("message", "") for item in conditions if item["type"] == "PodScheduled"), "")

    eventually(lambda: "Insufficient nvidia.com/gpu" in reported(), why="the neighbour finds no GPU")
    kubelet.job_runs("job-3v1")
    assert node_of(kubectl, "job-3v1") == tight

    # The gap at a backoff: a learner that failed is started again by its own container, with its GPU in hand.
    (mine,) = kubectl.list("pods", selector="stage2.dev/role=learner")
    kubelet.learner_runs("job-3v1", report='{"step": 4, "maxSteps": 10, "phase": "training", "restarts": 1}')
    eventually(lambda: (kubectl.get("rmj", "job-3v1") or {})["status"].get("restarts") == 1, why="the failure counts")
    (now,) = kubectl.list("pods", selector="stage2.dev/role=learner")
    assert now["metadata"]["uid"] == mine["metadata"]["uid"]
    assert "nodeName" not in (kubectl.get("pod", "neighbour") or {})["spec"], "it waits all the time"
    assert "Insufficient nvidia.com/gpu" in reported()


SECURE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def test_missing_volume_is_reported_and_moves_nothing(kubectl: Kubectl, controller: Controller, node: str) -> None:
    claim = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "mistyped"}}
    kubectl.apply(job(volumes=[claim]))
    reported = 'persistentvolumeclaim "mistyped" not found'
    eventually(lambda: reported in message(kubectl, "job-3v1"), why="the sentence is the job's")
    assert reason(kubectl, "job-3v1", "Placed") == "Unschedulable"
    uids = {item["metadata"]["uid"] for item in kubectl.list("deployments", "jobs")}
    body = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
    kubectl.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "mistyped"}, "spec": body})
    eventually(lambda: "unbound" in message(kubectl, "job-3v1"), why="the next sentence follows")
    assert {item["metadata"]["uid"] for item in kubectl.list("deployments", "jobs")} == uids


def test_servers_without_learner_release_their_node(kubectl: Kubectl, controller: Controller, node: str) -> None:
    """The learner alone waits for a volume that does not exist: no other node would mend it."""
    volume = {"name": "own", "persistentVolumeClaim": {"claimName": "mistyped"}}
    mounted = {"name": "learner", "volumeMounts": [{"name": "own", "mountPath": "/own"}]}
    kubectl.apply(job(learner={"gpus": 1, "template": {"spec": {"volumes": [volume], "containers": [mounted]}}}))
    eventually(lambda: node in places(kubectl, "job-3v1"), why="the servers have their node")
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "HalfPlaced", why="the job says that it is half placed")
    reported = 'persistentvolumeclaim "mistyped" not found'
    assert reported in message(kubectl, "job-3v1")
    eventually(lambda: places(kubectl, "job-3v1") == [], why="the servers gave their node back")
    told = lambda: [one["message"] for one in kubectl.list("events") if one["reason"] == "HalfPlaced"]  # noqa: E731
    (event,) = eventually(lambda: [one for one in told() if "gives" in one], why="an Event says it")
    assert reported in event


def test_jobs_never_share_gpus(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    kubectl("cordon", node)
    names = [nodes.add(f"{kubectl.namespace}-{index}", gpus=6, labels=HERE) for index in range(3)]
    jobs = [job(f"job-{index}") for index in range(5)]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": jobs})

    def places() -> list[str] | None:
        reported = [reason(kubectl, f"job-{index}", "Placed") for index in range(5)]
        return [node_of(kubectl, f"job-{i}") or "" for i in range(5)] if all(reported) else None

    found = eventually(places, why="every job is placed or refused")
    placed = [name for name in found if name]
    assert sorted(placed) == sorted(names)
    bound = [pod["spec"]["nodeName"] for pod in kubectl.list("pods") if pod["spec"].get("nodeName")]
    assert set(bound) <= set(names)
    done = next(i for i in range(5) if found[i])
    kubectl("delete", "rmj", f"job-{done}")
    left = [f"job-{i}" for i in range(5) if not found[i]]
    eventually(lambda: any(node_of(kubectl, name) for name in left), why="one follows")


def test_whole_job_moves_when_its_node_is_deleted(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    first = nodes.add(f"{kubectl.namespace}-first", gpus=4, labels=HERE)
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    assert node_of(kubectl, "job-3v1") == first
    nodes.remove(first)
    eventually(lambda: node_of(kubectl, "job-3v1") == node, why="the job has another node")
    eventually(lambda: "NodeLost" in {one["reason"] for one in kubectl.list("events")}, why="an Event says it")
    eventually(lambda: places(kubectl, "job-3v1") == [node] * 2, why="both pods are there, and the old ones gone")


def test_higher_priority_job_preempts_whole_lower_priority_job(
    kubectl: Kubectl, controller: Controller, nodes: FakeNodes, node: str, kubelet: Kubelet
) -> None:
    kubectl("cordon", node)
    nodes.add(f"{kubectl.namespace}-only", gpus=4, labels=HERE)
    urgent = f"{kubectl.namespace}-urgent"
    kubectl("create", "priorityclass", urgent, "--value=1000")
    try:
        kubectl.apply(job("low"))
        kubelet.job_runs("low")
        kubectl.apply(job("high", placement={"nodeSelector": HERE, "priorityClassName": urgent}))
        kubelet.job_runs("high")
        eventually(lambda: reason(kubectl, "low", "Placed") == "NoSingleNodeFits", why="the other waits")
        selector = "stage2.dev/job=low"
        eventually(
            lambda: not any(pod["spec"].get("nodeName") for pod in kubectl.list("pods", selector=selector)),
            why="and holds no GPU",
        )
    finally:
        kubectl("delete", "priorityclass", urgent)
