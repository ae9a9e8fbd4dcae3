"""What Kueue does otherwise by its configuration: jobs as a framework of others, and quota for claimed devices."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, job, phase
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_claims import TEMPLATE, Offer, claimed, offer, places
from tests.cluster.controller.test_kueue import QUEUE, _apply, _message, _queue, _runs, controller, kueue, team
from tests.cluster.controller.test_provisioning import restart

pytestmark = [
    pytest.mark.alone,
    pytest.mark.timeout(1800),  # the first run on a machine builds Kueue
    pytest.mark.skipif("STAGE2_KUEUE_CONFIGURED" not in os.environ, reason="minutes of Kueue, for whoever asks for it"),
]
FIXTURES = (claimed, controller, kueue, offer, team)  # they are found by their names
CONFIG, KEY = "kueue-manager-config", "controller_manager_config.yaml"
READER = "stage2-test-kueue"
DEVICES = "devices.example.com/gpu"


@pytest.fixture
def configured(kueue: None, admin: Kubectl, kubectl: Kubectl) -> Iterator[None]:
    """Kueue that knows jobs of stage2, may read them, and counts devices of the test's class."""
    own = replace(admin, namespace="kueue-system")
    before = (own.get("configmap", CONFIG) or {})["data"][KEY]
    wanted = yaml.safe_load(before)
    wanted["integrations"]["externalFrameworks"] = ["RolloutMatchingJob.v1alpha1.stage2.dev"]
    wanted["featureGates"] = {"DynamicResourceAllocation": True}
    mapping = {"name": DEVICES, "deviceClassNames": [f"{kubectl.namespace}.gpu.example"]}
    wanted["resources"] = {"deviceClassMappings": [mapping]}
    rule = "--verb=get,list,watch"
    own("create", "clusterrole", READER, rule, "--resource=rolloutmatchingjobs.stage2.dev")
    account = "--serviceaccount=kueue-system:kueue-controller-manager"
    own("create", "clusterrolebinding", READER, f"--clusterrole={READER}", account)
    _configure(own, yaml.safe_dump(wanted))
    yield
    _configure(own, before)
    own("delete", "clusterrole,clusterrolebinding", READER)


def _configure(own: Kubectl, text: str) -> None:
    own("patch", "configmap", CONFIG, "--type=merge", "-p", json.dumps({"data": {KEY: text}}))
    restart(own)


def workloads(kubectl: Kubectl) -> list[str]:
    """The names of what asks for quota in the test's namespace."""
    return sorted(one["metadata"]["name"] for one in kubectl.list("workloads"))


def test_where_every_job_is_put_into_a_default_queue_the_job_says_what_to_configure(
    kubectl: Kubectl, team: list[str], controller: Controller
) -> None:
    with _queue(kubectl, f"{kubectl.namespace}-default", "default"):
        _apply(kubectl, "first")
        wanted = "RolloutMatchingJob.v1alpha1.stage2.dev to integrations.externalFrameworks"
        eventually(lambda: wanted in _message(kubectl, "first"), why="the job says so", timeout_s=60)
        assert len(workloads(kubectl)) == 2


def test_where_kueue_knows_jobs_nothing_is_charged_twice_and_claimed_devices_are(
    configured: None,
    kubectl: Kubectl,
    team: list[str],
    offer: Offer,
    claimed: Object,
    controller: Controller,
    kubelet: Kubelet,
) -> None:
    kubectl.apply(claimed)
    node = offer("devices", 8)
    own = f"{kubectl.namespace}-devices"
    with _queue(kubectl, f"{own}-default", "default"), _queue(kubectl, own, "devices", topologyName=None):
        patch = [{"op": "add", "path": "/spec/resourceGroups/0/coveredResources/-", "value": DEVICES}]
        quota = {"name": DEVICES, "nominalQuota": 4}
        patch += [{"op": "add", "path": "/spec/resourceGroups/0/flavors/0/resources/-", "value": quota}]
        kubectl("patch", "clusterqueue", own, "--type=json", "-p", json.dumps(patch))
        kubectl.apply(_claiming("first"))
        eventually(lambda: places(kubectl) == [node] * 2, why=f"it runs: {_message(kubectl, 'first')}", timeout_s=60)
        assert workloads(kubectl) == ["first-quota"]
        learner = kubectl.get("job", "first-learner") or {}
        assert QUEUE not in learner["metadata"]["labels"]
        kubectl.apply(_claiming("second"))
        eventually(lambda: DEVICES in _message(kubectl, "second"), why="the quota is used up", timeout_s=60)
        kubelet.servers_answer("first")
        kubelet.learner_runs("first")
        eventually(lambda: phase(kubectl, "first") == "Running", why="the job runs")


def _claiming(name: str) -> Object:
    part = {"resourceClaimTemplate": TEMPLATE}
    placement = {"nodeSelector": HERE, "mode": "Scheduler"}
    made = job(name, rollout={"servers": 3, **part}, learner={"gpus": 1, **part}, placement=placement)
    made["metadata"]["labels"] = {QUEUE: "devices"}
    return made


def test_a_rank_of_kueues_own_goes_before_who_came_first(
    kubectl: Kubectl, team: list[str], controller: Controller, kubelet: Kubelet
) -> None:
    name = f"{kubectl.namespace}-urgent"
    _apply(kubectl, "first")
    _runs(kubectl, kubelet, "first")
    for waiting, labels in (("patient", {}), ("hasty", {"kueue.x-k8s.io/priority-class": name})):
        made = job(waiting, placement={"nodeSelector": HERE})
        made["metadata"]["labels"] = {QUEUE: "team", **labels}
        kubectl.apply(made)
    eventually(lambda: "does not exist" in _message(kubectl, "hasty"), why="its class is named")
    kind = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "WorkloadPriorityClass", "metadata": {"name": name}}
    kubectl.apply({**kind, "value": 1000, "description": "x"})
    try:
        _runs(kubectl, kubelet, "hasty")  # it takes the place of the first, and the patient one waits on
        assert kubelet.pod("patient", "rollout") is None
    finally:
        kubectl("delete", "rmj", "--all", "--timeout=600s")
        kubectl("delete", "workloadpriorityclass", name)


def test_a_job_that_waits_goes_to_the_queue_of_its_new_label(
    kubectl: Kubectl, team: list[str], controller: Controller, nodes: FakeNodes, kubelet: Kubelet
) -> None:
    _apply(kubectl, "first")
    _runs(kubectl, kubelet, "first")
    _apply(kubectl, "second")
    eventually(lambda: "nvidia.com/gpu" in _message(kubectl, "second"), why="it waits")
    own = f"{kubectl.namespace}-other"
    pool = {**HERE, "pool": own}
    nodes.add(own, gpus=4, labels=pool)
    with _queue(kubectl, own, "other", nodeLabels=pool):
        kubectl("label", "rmj", "second", f"{QUEUE}=other", "--overwrite")
        _runs(kubectl, kubelet, "second")
        kubectl("label", "rmj", "first", f"{QUEUE}-")
        _apply(kubectl, "third")
        eventually(lambda: _message(kubectl, "third"), why="it waits")
        kubectl("label", "rmj", "third", f"{QUEUE}-")
        eventually(lambda: "third-quota" not in workloads(kubectl), why="its place in the queue goes")
