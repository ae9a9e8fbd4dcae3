"""What Kueue does otherwise by its configuration: jobs as a framework of others, and quota for claimed devices."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, job
from tests.cluster.controller.kueue.queues import QUEUE, queue, quota_message
from tests.cluster.controller.kueue.test_provisioning import restart
from tests.cluster.controller.kueue.test_queues import workloads
from tests.cluster.controller.test_claims import TEMPLATE, Offer, claimed, offer, places

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif("STAGE2_KUEUE_CONFIGURED" not in os.environ, reason="minutes of Kueue, for whoever asks for it"),
]
FIXTURES = (claimed, offer)  # they are found by their names
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


def test_kueue_with_job_integration_charges_each_job_once_and_counts_claimed_devices(
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
    with queue(kubectl, f"{own}-default", "default"), queue(kubectl, own, "devices", topologyName=None):
        patch = [{"op": "add", "path": "/spec/resourceGroups/0/coveredResources/-", "value": DEVICES}]
        quota = {"name": DEVICES, "nominalQuota": 4}
        patch += [{"op": "add", "path": "/spec/resourceGroups/0/flavors/0/resources/-", "value": quota}]
        kubectl("patch", "clusterqueue", own, "--type=json", "-p", json.dumps(patch))
        kubectl.apply(_claiming("first"))
        eventually(lambda: places(kubectl) == [node] * 2, why=f"it runs: {quota_message(kubectl, 'first')}")
        assert workloads(kubectl) == ["first-quota"]
        learner = kubectl.get("job", "first-learner") or {}
        assert QUEUE not in learner["metadata"]["labels"]
        kubectl.apply(_claiming("second"))
        eventually(lambda: DEVICES in quota_message(kubectl, "second"), why="the quota is used up")
        kubelet.job_runs("first")


def _claiming(name: str) -> Object:
    part = {"resourceClaimTemplate": TEMPLATE}
    placement = {"nodeSelector": HERE, "mode": "Scheduler"}
    made = job(name, rollout={"servers": 3, **part}, learner={"gpus": 1, **part}, placement=placement)
    made["metadata"]["labels"] = {QUEUE: "devices"}
    return made
