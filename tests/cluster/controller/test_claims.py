"""GPUs by claims of resource.k8s.io/v1: the real scheduler gives devices of published slices to a job's pods.

No driver runs: a test publishes what one would, ResourceSlices of nodes that are objects only.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, job, phase, reason
from tests.cluster.controller.fake_nodes import FakeNodes

pytestmark = pytest.mark.in_turns(3, apart=True)

API = "resource.k8s.io/v1"
TEMPLATE = "one-gpu"
Offer = Callable[[str, int], str]


@pytest.fixture
def offer(kubectl: Kubectl, nodes: FakeNodes) -> Iterator[Offer]:
    """Adds a node, without GPUs that are counted, and publishes so many devices of it."""
    driver, made = f"{kubectl.namespace}.gpu.example", []
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    device_class = {"apiVersion": API, "kind": "DeviceClass", "metadata": {"name": driver}}
    kubectl.apply({**device_class, "spec": {"selectors": [selector]}})

    def offered(name: str, devices: int) -> str:
        node = nodes.add(f"{kubectl.namespace}-{name}", gpus=0, labels={**HERE, "name": name})
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        listed = [{"name": f"gpu-{index}"} for index in range(devices)]
        spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": listed}
        kubectl.apply({"apiVersion": API, "kind": "ResourceSlice", "metadata": {"name": node}, "spec": spec})
        made.append(node)
        return node

    yield offered
    kubectl("delete", "rmj", "--all", "--timeout=600s")
    kubectl("delete", "deviceclass", driver)
    kubectl("delete", "resourceslice", *made)


@pytest.fixture
def claimed(kubectl: Kubectl, offer: Offer) -> Object:
    """The template of a claim for one GPU."""
    return claim_template(kubectl, TEMPLATE, 1)


def claim_template(kubectl: Kubectl, name: str, gpus: int) -> Object:
    """The template of a claim for so many GPUs."""
    exactly = {"deviceClassName": f"{kubectl.namespace}.gpu.example", "count": gpus}
    spec = {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
    return {"apiVersion": API, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def claiming(name: str = "job-3v1", **placement: object) -> Object:
    """A job of three servers and a learner, each with a claim."""
    return job(
        name,
        rollout={"servers": 3, "resourceClaimTemplate": TEMPLATE},
        learner={"gpus": 1, "resourceClaimTemplate": TEMPLATE},
        placement={"nodeSelector": HERE, "mode": "Scheduler", **placement},
    )


def devices_of(kubectl: Kubectl, pod: Object) -> list[tuple[str, str]]:
    """Pool and name of the devices that a pod's claims were given."""
    made = [one["resourceClaimName"] for one in pod["status"].get("resourceClaimStatuses", [])]
    claims = [kubectl.get("resourceclaim", name) or {} for name in made]
    given = [one.get("status", {}).get("allocation", {}).get("devices", {}).get("results", []) for one in claims]
    return [(result["pool"], result["device"]) for results in given for result in results]


def places(kubectl: Kubectl) -> list[str]:
    """The nodes of the job's pods that are not about to end."""
    live = [pod for pod in kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]]
    return [pod["spec"].get("nodeName", "") for pod in live]


def message(kubectl: Kubectl, condition: str) -> str:
    conditions = (kubectl.get("rmj", "job-3v1") or {}).get("status", {}).get("conditions", [])
    return next((str(item["message"]) for item in conditions if item["type"] == condition), "")


def test_servers_and_learner_get_own_devices_on_one_node(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet, offer: Offer, claimed: Object
) -> None:
    kubectl.apply(claimed)
    offer("small", 2)
    kubectl.apply(claiming())
    wanted = "cannot allocate all claims"
    eventually(lambda: wanted in message(kubectl, "Training"), why="the scheduler's sentence is the job's")
    assert not any(places(kubectl))

    large = offer("large", 4)
    eventually(lambda: places(kubectl) == [large] * 2, why="both pods are there")
    pods = kubectl.list("pods")
    given = [device for pod in pods for device in devices_of(kubectl, pod)]
    assert sorted(given) == [(large, f"gpu-{index}") for index in range(4)]
    asked = [one["resources"] for pod in pods for one in pod["spec"]["containers"]]
    assert all(resources.keys() == {"claims"} for resources in asked), asked

    kubelet.job_runs("job-3v1")
    kubelet.learner_ends("job-3v1", 0)
    eventually(lambda: phase(kubectl, "job-3v1") == "Succeeded", why="the job is done")
    eventually(lambda: held(kubectl) == [], why="its devices are free again")


def test_server_claim_holds_several_devices(
    kubectl: Kubectl, controller: Controller, offer: Offer, claimed: Object
) -> None:
    """Two servers of two GPUs and a learner of one, on a node of five devices; one of three is too small."""
    for body in (claimed, claim_template(kubectl, "two-gpus", 2)):
        kubectl.apply(body)
    offer("small", 3)
    node = offer("large", 5)
    made = claiming()
    matching = made["spec"]["config"]["custom"]["extra"]["rollout_matching"]
    matching["vllm"]["tensor_parallel_size"] = 2
    made["spec"]["rollout"] = {"servers": 2, "gpusPerServer": 2, "resourceClaimTemplate": "two-gpus"}
    kubectl.apply(made)
    given = lambda: sorted(one for pod in kubectl.list("pods") for one in devices_of(kubectl, pod))  # noqa: E731
    eventually(lambda: given() == [(node, f"gpu-{index}") for index in range(5)], why="each device is one's alone")
    (servers,) = kubectl.list("pods", selector="stage2.dev/role=rollout")
    names = {one["name"]: one["resourceClaimName"] for one in servers["status"]["resourceClaimStatuses"]}
    assert names.keys() == {"server-0", "server-1"}
    for name in names.values():
        claim = kubectl.get("resourceclaim", name) or {}
        assert len(claim["status"]["allocation"]["devices"]["results"]) == 2


def held(kubectl: Kubectl) -> list[str]:
    """The claims that hold a device."""
    claims = kubectl.list("resourceclaims")
    return [one["metadata"]["name"] for one in claims if one.get("status", {}).get("allocation")]


def test_nodes_too_small_for_claims_are_tried_last(
    kubectl: Kubectl, controller: Controller, offer: Offer, claimed: Object
) -> None:
    """The job prefers the node that has no device for its learner: by itself it would go there for ever."""
    kubectl.apply(claimed)
    half, whole = offer("half", 3), offer("whole", 4)
    here = {"matchExpressions": [{"key": "name", "operator": "In", "values": ["half"]}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 50, "preference": here}]}
    kubectl.apply(claiming(affinity={"nodeAffinity": preferred}))
    eventually(lambda: half in places(kubectl), why="the servers have devices")
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "HalfPlaced", why="the learner has none")
    eventually(lambda: places(kubectl) == [whole] * 2, why="the whole job is on the other node", timeout_s=240)


def test_missing_claim_template_is_reported(
    kubectl: Kubectl, controller: Controller, offer: Offer, claimed: Object
) -> None:
    node = offer("large", 4)
    kubectl.apply(claiming())
    eventually(lambda: f"ResourceClaimTemplate {TEMPLATE}" in message(kubectl, "Training"), why="it is named")
    kubectl.apply(claimed)
    eventually(lambda: places(kubectl) == [node] * 2, why="claims are made, and devices given")
