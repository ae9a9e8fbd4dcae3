"""A queue whose capacity is bought on demand: the real Kueue asks by ProvisioningRequest, a test plays the autoscaler.

What is asked for is Kueue's; nodes come as objects, once the test has answered as cluster-autoscaler does.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, job, reason
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.queues import QUEUE, accepted, queue, quota_message

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(3, apart=True)]
_NOW = "2026-01-01T00:00:00Z"
API = "kueue.x-k8s.io/v1beta2"
CRD = "provisioningrequests.autoscaling.x-k8s.io"
CLASS = "best-effort-atomic-scale-up.autoscaling.x-k8s.io"
POOL = "example.com/pool"
CONSUMES = "autoscaling.x-k8s.io/consume-provisioning-request"


@pytest.fixture(scope="module")
def provisioning(admin: Kubectl, kueue: None) -> Iterator[None]:
    """The definition of ProvisioningRequest, as far as it is read here, and a Kueue that found it when it began.

    Source: k8s.io/autoscaler/cluster-autoscaler/apis, config/crd.
    """
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"type": "object", "properties": {"spec": anything, "status": anything}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}}
    names = {"kind": "ProvisioningRequest", "listKind": "ProvisioningRequestList", "plural": CRD.partition(".")[0]}
    spec = {
        "group": CRD.partition(".")[2],
        "names": {**names, "singular": "provisioningrequest"},
        "scope": "Namespaced",
        "versions": [{**version, "schema": {"openAPIV3Schema": schema}}],
    }
    kind = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    admin.apply({**kind, "metadata": {"name": CRD}, "spec": spec})
    admin("wait", "--for=condition=Established", "crd", CRD, "--timeout=600s")
    restart(admin)
    yield
    admin("delete", "crd", CRD)
    restart(admin)


def restart(admin: Kubectl) -> None:
    """Has Kueue begin anew, and waits until it answers."""
    where = ("deployment", "kueue-controller-manager", "--namespace=kueue-system")
    admin("rollout", "restart", *where)
    admin("rollout", "status", *where, "--timeout=600s")


class Market:
    """The autoscaler's side: what is asked for, and what is answered."""

    def __init__(self, kubectl: Kubectl, pool: str) -> None:
        self._kubectl = kubectl
        self.pool = pool

    def request_names(self) -> list[str]:
        """The names of the requests, the oldest first."""
        return [one["metadata"]["name"] for one in self._kubectl.list("provisioningrequests")]

    def request(self, attempt: int) -> Object:
        """The request of one attempt, once there is one."""

        def requested() -> Object | None:
            requests = self._kubectl.list("provisioningrequests")
            return next((one for one in requests if one["metadata"]["name"].endswith(f"-{attempt}")), None)

        request: Object = eventually(requested, why=f"Kueue asks for machines, attempt {attempt}")
        return request

    def answer(self, request: Object, **conditions: tuple[str, str]) -> None:
        """Writes conditions, each with status and message, as cluster-autoscaler would."""
        reported = [
            {"type": kind, "status": status, "message": message, "reason": "Test", "lastTransitionTime": _NOW}
            for kind, (status, message) in conditions.items()
        ]
        status = {"conditions": reported, "provisioningClassDetails": {"pool": self.pool}}
        self._kubectl.set_status("provisioningrequest", request["metadata"]["name"], status)


@contextmanager
def _checked(kubectl: Kubectl, own: str, retries: int) -> Iterator[None]:
    """An admission check that asks for machines; a failed request is made anew so many times, a second later."""
    again = {"backoffLimitCount": retries, "backoffBaseSeconds": 1, "backoffMaxSeconds": 1}
    selected = [{"key": POOL, "valueFromProvisioningClassDetail": "pool"}]
    wanted = {"provisioningClassName": CLASS, "retryStrategy": again, "podSetUpdates": {"nodeSelector": selected}}
    config = {"kind": "ProvisioningRequestConfig", "spec": wanted}
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "ProvisioningRequestConfig", "name": own}
    served = {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": parameters}
    for body in (config, {"kind": "AdmissionCheck", "spec": served}):
        made = {"apiVersion": API, "metadata": {"name": own}, **body}
        eventually(partial(accepted, kubectl, made), why="Kueue answers")
    strategy = {"spec": {"admissionChecksStrategy": {"admissionChecks": [{"name": own}]}}}
    kubectl("patch", "clusterqueue", own, "--type=merge", "-p", json.dumps(strategy))
    yield
    kubectl("delete", "rmj", "--all", "--timeout=600s")
    kubectl("patch", "clusterqueue", own, "--type=merge", "-p", json.dumps({"spec": {"admissionChecksStrategy": None}}))
    kubectl("delete", "admissioncheck", own, "--timeout=600s")
    kubectl("delete", "provisioningrequestconfig", own)


@pytest.fixture
def market(request: pytest.FixtureRequest, provisioning: None, kubectl: Kubectl, nodes: FakeNodes) -> Iterator[Market]:
    """A queue `team` of four GPUs, which no node has yet; its requests are repeated as often as the test says."""
    own = kubectl.namespace
    with queue(kubectl, own, nodeLabels={**HERE}), _checked(kubectl, own, request.param):
        yield Market(kubectl, own)


@pytest.fixture
def team(market: Market) -> Market:
    """The queue that the controller finds when it starts."""
    return market


def queued(name: str = "job-3v1") -> Object:
    made = job(name)
    made["metadata"]["labels"] = {QUEUE: "team"}
    return made


def holds_quota(kubectl: Kubectl) -> bool:
    conditions = (kubectl.get("workload", "job-3v1-quota") or {}).get("status", {}).get("conditions", [])
    return any(item["type"] == "QuotaReserved" and item["status"] == "True" for item in conditions)


def runs_on(kubectl: Kubectl, kubelet: Kubelet, node: str, request: str) -> None:
    """Both pods name the request, go to its pool, and have the node; then the job runs."""

    def placed() -> list[Any]:
        pods = [pod for pod in kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]]
        return [pod["spec"].get("nodeName") for pod in pods]

    eventually(lambda: placed() == [node] * 2, why=f"both pods are there: {quota_message(kubectl, 'job-3v1')}")
    for pod in kubectl.list("pods"):
        assert pod["metadata"]["annotations"][CONSUMES] == request
        assert pod["metadata"]["annotations"]["autoscaling.x-k8s.io/provisioning-class-name"] == CLASS
        assert pod["spec"]["nodeSelector"][POOL] == kubectl.namespace
    kubelet.job_runs("job-3v1")


@pytest.mark.parametrize("market", [3], indirect=True)
def test_job_waits_for_machines_requested_by_kueue_and_runs_on_them(
    kubectl: Kubectl, controller: Controller, market: Market, nodes: FakeNodes, kubelet: Kubelet
) -> None:
    kubectl.apply(queued())
    request = market.request(1)
    assert len(request["spec"]["podSets"]) == 2
    market.answer(request, Accepted=("True", "accepted"), Provisioned=("False", "ETA: five minutes"))
    wanted = f"waits in queue team: admission check {market.pool}: ETA: five minutes"
    eventually(lambda: quota_message(kubectl, "job-3v1") == wanted, why="the job says what it waits for")
    assert not kubectl.list("pods", "deployments", "jobs")
    node = nodes.add(market.pool, gpus=4, labels={**HERE, POOL: market.pool})
    market.answer(request, Accepted=("True", "accepted"), Provisioned=("True", "four GPUs are here"))
    runs_on(kubectl, kubelet, node, request["metadata"]["name"])


@pytest.mark.parametrize("market", [1], indirect=True)
def test_failed_provisioning_is_reported_and_requested_again(
    kubectl: Kubectl, controller: Controller, market: Market, nodes: FakeNodes, kubelet: Kubelet
) -> None:
    kubectl.apply(queued())
    market.answer(market.request(1), Failed=("True", "no machine of this kind in the zone"))
    second = market.request(2)
    told = lambda: [one["message"] for one in kubectl.list("events") if one["reason"] == "AdmissionCheckFailed"]  # noqa: E731
    eventually(lambda: "no machine of this kind in the zone" in "".join(told()), why="an Event says it")
    node = nodes.add(market.pool, gpus=4, labels={**HERE, POOL: market.pool})
    market.answer(second, Accepted=("True", "accepted"), Provisioned=("True", "four GPUs are here"))
    runs_on(kubectl, kubelet, node, second["metadata"]["name"])


@pytest.mark.parametrize("market", [0], indirect=True)
def test_rejected_job_releases_quota_and_requests_machines_again_after_suspension(
    kubectl: Kubectl, controller: Controller, market: Market, nodes: FakeNodes, kubelet: Kubelet
) -> None:
    kubectl.apply(queued())
    first = market.request(1)
    market.answer(first, Failed=("True", "no machine of this kind at all"))
    eventually(lambda: reason(kubectl, "job-3v1", "QuotaReserved") == "QuotaRefused", why="it says so")
    assert "were rejected" in quota_message(kubectl, "job-3v1")
    eventually(lambda: not holds_quota(kubectl), why="its quota is free")
    workload = kubectl.get("workload", "job-3v1-quota") or {}
    assert workload["spec"]["active"] is False
    assert market.request_names() == [first["metadata"]["name"]]

    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    eventually(lambda: kubectl.get("workload", "job-3v1-quota") is None, why="a suspended job has no Workload")
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": {"suspend": False}}))
    eventually(lambda: first["metadata"]["uid"] not in uids(kubectl) and market.request_names(), why="it asks anew")
    again = market.request(1)
    node = nodes.add(market.pool, gpus=4, labels={**HERE, POOL: market.pool})
    market.answer(again, Accepted=("True", "accepted"), Provisioned=("True", "four GPUs are here"))
    runs_on(kubectl, kubelet, node, again["metadata"]["name"])


def uids(kubectl: Kubectl) -> set[str]:
    return {one["metadata"]["uid"] for one in kubectl.list("provisioningrequests")}
