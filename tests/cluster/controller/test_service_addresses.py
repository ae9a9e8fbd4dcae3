"""What stands behind a job's Service on a real API server: the servers of its present attempt."""

import json
from typing import Any

from stage2_controller.children.manifest import labels
from stage2_controller.job import names
from tests.cluster.controller.conftest import SERVERS_ADDRESS, Controller, Kubectl, Kubelet, eventually, job

SERVICE = "job-3v1-rollout"
OF_SERVICE = f"kubernetes.io/service-name={SERVICE}"
LEFT = "192.0.2.66"


def behind(kubectl: Kubectl) -> list[str]:
    """All addresses that the cluster has behind the Service."""
    slices = kubectl.list("endpointslices", selector=OF_SERVICE)
    endpoints = [one for each in slices for one in each["endpoints"] or []]
    return sorted(address for one in endpoints for address in one["addresses"])


def left_behind(kubectl: Kubectl, node: str) -> None:
    """Make a ready pod with the labels of the job's servers, but of another attempt."""
    security = {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "server-0",
        "image": "x",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    metadata = {"name": "left", "labels": {**labels("job-3v1", names.ROLE_ROLLOUT), names.LABEL_ATTEMPT: "earlier"}}
    spec = {"nodeName": node, "containers": [container], "securityContext": security}
    kubectl("create", "-f", "-", stdin={"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    ready = [{"type": "Ready", "status": "True"}]
    reported = {"phase": "Running", "podIP": LEFT, "podIPs": [{"ip": LEFT}], "conditions": ready}
    kubectl.set_status("pod", "left", reported)


def selector(kubectl: Kubectl) -> Any:
    return (kubectl.get("service", SERVICE) or {})["spec"]["selector"]


def test_service_routes_only_to_servers_of_current_attempt(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet, node: str
) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="its servers are behind their Service")
    wanted = selector(kubectl)
    worn = labels("job-3v1", names.ROLE_ROLLOUT)
    left_behind(kubectl, node)
    kubectl("patch", "service", SERVICE, "--type=merge", "-p", json.dumps({"spec": {"selector": worn}}))
    eventually(lambda: selector(kubectl) == wanted, why="a selector that somebody changed is mended")
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="servers that an attempt left are out")
    kubectl("delete", "pod", "left", "--wait=false")


def test_service_addresses_follow_pods_without_controller(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    eventually(lambda: kubelet.pod("job-3v1", names.ROLE_ROLLOUT), why="the servers' pod exists")
    controller.stop(kill=True)
    kubelet.servers_answer("job-3v1")
    eventually(lambda: behind(kubectl) == [SERVERS_ADDRESS], why="its servers are behind their Service")
    kubectl("delete", "deployment", "job-3v1-rollout")
    eventually(lambda: behind(kubectl) == [], why="the address goes with its pod")
    controller.start()
