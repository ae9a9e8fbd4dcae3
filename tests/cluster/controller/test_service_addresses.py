"""What stands behind a job's Service on a real API server: the job's own servers, whatever others wear or write."""

import json
from typing import Any

import pytest

from stage2_controller.children.manifest import labels
from stage2_controller.spec import names
from tests.cluster.controller.conftest import SERVERS_ADDRESS, Controller, Kubectl, Kubelet, eventually, job

pytestmark = pytest.mark.timeout(300)
SERVICE = "job-3v1-rollout"
OF_SERVICE = f"kubernetes.io/service-name={SERVICE}"
THEIRS = "192.0.2.66"
NEXT = "192.0.2.8"


def behind(kubectl: Kubectl) -> list[str]:
    """All addresses that the cluster has behind the Service, whoever wrote them."""
    slices = kubectl.list("endpointslices", selector=OF_SERVICE)
    endpoints = [one for each in slices for one in each["endpoints"] or []]
    return sorted(address for one in endpoints for address in one["addresses"])


def running(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    """A job whose servers are behind their Service."""
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="its servers are behind their Service")


def stranger(kubectl: Kubectl, node: str) -> None:
    """Make a ready pod that wears all that a pod of the job's wears and anybody can write."""
    uid = (kubectl.get("rmj", "job-3v1") or {})["metadata"]["uid"]
    security = {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "server-0",
        "image": "x",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    metadata = {
        "name": "stranger",
        "labels": labels("job-3v1", names.ROLE_ROLLOUT),
        "annotations": {names.ANNOTATION_JOB: "job-3v1", names.ANNOTATION_JOB_UID: uid},
    }
    spec = {"nodeName": node, "containers": [container], "securityContext": security}
    kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ready = [{"type": "Ready", "status": "True"}]
    reported = {"phase": "Running", "podIP": THEIRS, "podIPs": [{"ip": THEIRS}], "conditions": ready}
    kubectl.set_status("pod", "stranger", reported)


def own_pod(kubectl: Kubectl) -> Any:
    """The job's own rollout pod that is not on its way out, or None."""
    selector = f"stage2.dev/job=job-3v1,stage2.dev/role={names.ROLE_ROLLOUT}"
    found = [one for one in kubectl.list("pods", selector=selector) if "ownerReferences" in one["metadata"]]
    return next((one for one in found if "deletionTimestamp" not in one["metadata"]), None)


def test_labels_alone_serve_no_requests(kubectl: Kubectl, controller: Controller, kubelet: Kubelet, node: str) -> None:
    running(kubectl, controller, kubelet)
    before = (kubectl.get("rmj", "job-3v1") or {})["status"]
    stranger(kubectl, node)
    kubectl("annotate", "rmj", "job-3v1", "poke=1")  # a pass that has seen the stranger
    servers = own_pod(kubectl)
    kubectl("delete", "pod", servers["metadata"]["name"], "--wait=false")
    following = eventually(
        lambda: (found := own_pod(kubectl)) and found["spec"].get("nodeName") and found, why="the next servers' pod"
    )
    kubectl.set_status("pod", following["metadata"]["name"], {"podIP": NEXT, "podIPs": [{"ip": NEXT}]})
    eventually(lambda: behind(kubectl) == [NEXT], why="the next servers take the place of those that are gone")
    assert (kubectl.get("rmj", "job-3v1") or {})["status"]["servers"][0]["name"] == before["servers"][0]["name"]
    assert not kubectl.list("endpoints") or THEIRS not in json.dumps(kubectl.list("endpoints"))
    kubectl("delete", "pod", "stranger", "--wait=false")


def test_foreign_addresses_are_mended(kubectl: Kubectl, controller: Controller, kubelet: Kubelet, node: str) -> None:
    running(kubectl, controller, kubelet)
    stranger(kubectl, node)
    worn = labels("job-3v1", names.ROLE_ROLLOUT)
    kubectl("patch", "service", SERVICE, "--type=merge", "-p", json.dumps({"spec": {"selector": worn}}))
    eventually(
        lambda: (found := kubectl.get("service", SERVICE)) and not found["spec"].get("selector"),
        why="it chooses nobody",
    )
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="the stranger is out again", timeout_s=60)
    (written,) = kubectl.list("endpointslices", selector=OF_SERVICE)
    widened = [*written["endpoints"], {"addresses": [THEIRS]}]
    name = written["metadata"]["name"]
    kubectl("patch", "endpointslice", name, "--type=merge", "-p", json.dumps({"endpoints": widened}))
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="the address that was added is out again")
    kubectl("delete", "endpointslice", name)
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="a slice that was deleted is back")
    kubectl("delete", "pod", "stranger", "--wait=false")


def test_addresses_are_caught_up_after_a_restart(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    eventually(lambda: own_pod(kubectl), why="the servers' pod exists")
    controller.stop(kill=True)
    kubelet.servers_answer("job-3v1")
    assert behind(kubectl) == []
    controller.start()
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="what happened meanwhile is caught up")
    controller.stop(kill=True)
    kubectl("delete", "deployment", "job-3v1-rollout")
    eventually(lambda: behind(kubectl) == [], why="the address goes with its pod, though no controller runs")
    controller.start()
    kubectl("delete", "rmj", "job-3v1", "--timeout=600s")
    eventually(lambda: not kubectl.list("endpointslices", selector=OF_SERVICE), why="nothing is left", timeout_s=60)
