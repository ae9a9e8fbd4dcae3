"""Jobs in queues of the real Kueue, built from its module: they wait, run where it says, give way and come back."""

import json
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.cluster.controller.conftest import HERE, Controller, Kubectl, Kubelet, Object, eventually, phase, reason
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.kueue.queues import apply_queued, queue, quota_message, until_running

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(4, apart=True)]
REST_S = 5.0  # nothing makes a pass of its own in it: a job that runs is looked at each ten seconds


@pytest.fixture
def urgent(kubectl: Kubectl) -> Iterator[str]:
    """A PriorityClass above the default."""
    name = f"{kubectl.namespace}-urgent"
    kubectl("create", "priorityclass", name, "--value=1000")
    yield name
    kubectl("delete", "priorityclass", name)


def test_jobs_use_and_release_quota(
    kubectl: Kubectl, controller: Controller, team: list[str], kubelet: Kubelet
) -> None:
    apply_queued(kubectl, "first")
    until_running(kubectl, kubelet, "first")
    assert _assigned(kubectl, "first") == _host(kubelet, "first") in team
    eventually(lambda: "PodsReady" in _true(kubectl, "first"), why="Kueue knows it")

    apply_queued(kubectl, "second")
    eventually(lambda: reason(kubectl, "second", "QuotaReserved") == "QuotaPending", why="the second waits")
    eventually(lambda: "nvidia.com/gpu" in quota_message(kubectl, "second"), why="it says what it waits for")
    assert kubelet.pod("second", "rollout") is None

    kubelet.learner_ends("first", 0)
    eventually(lambda: phase(kubectl, "first") == "Succeeded", why="the first is done")
    until_running(kubectl, kubelet, "second")
    assert "Finished" in _true(kubectl, "first")


def test_preempted_job_runs_again(kubectl: Kubectl, controller: Controller, kubelet: Kubelet, urgent: str) -> None:
    apply_queued(kubectl, "patient")
    until_running(kubectl, kubelet, "patient")

    apply_queued(kubectl, "hasty", priority_class=urgent)
    eventually(lambda: reason(kubectl, "patient", "QuotaReserved") == "QuotaPending", why="it waits")
    eventually(lambda: kubelet.pod("patient", "learner") is None, why="its learner is gone")
    eventually(lambda: kubelet.pod("patient", "rollout") is None, why="its servers are gone")
    until_running(kubectl, kubelet, "hasty")

    kubelet.learner_ends("hasty", 0)
    eventually(lambda: phase(kubectl, "hasty") == "Succeeded", why="the hasty one is done")
    until_running(kubectl, kubelet, "patient")
    assert (kubectl.get("rmj", "patient") or {})["status"].get("restarts", 0) == 0, "preemption counts as no failure"


def test_drained_job_returns_quota_and_gets_another_host(
    kubectl: Kubectl, controller: Controller, team: list[str], kubelet: Kubelet
) -> None:
    apply_queued(kubectl, "drained")
    until_running(kubectl, kubelet, "drained")
    host = _assigned(kubectl, "drained")
    (other,) = set(team) - {host}
    kubectl("cordon", host)
    kubectl("delete", "pods", "--selector=stage2.dev/job=drained", "--wait=false")
    there = partial(_has_both_pods_on, kubectl, "drained", other)
    eventually(there, why="its quota went back and came again", timeout_s=150)
    assert _assigned(kubectl, "drained") == other
    eventually(partial(_rests, kubectl, "drained"), why="its Workload is written no more")


def _has_both_pods_on(kubectl: Kubectl, name: str, host: str) -> bool:
    pods = kubectl.list("pods", selector=f"stage2.dev/job={name}")
    return [pod["spec"].get("nodeName") for pod in pods if "deletionTimestamp" not in pod["metadata"]] == [host] * 2


def test_suspended_job_releases_its_quota(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    apply_queued(kubectl, "first")
    until_running(kubectl, kubelet, "first")
    apply_queued(kubectl, "second")

    kubectl("patch", "rmj", "first", "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    until_running(kubectl, kubelet, "second")

    kubectl("patch", "rmj", "first", "--type=merge", "-p", json.dumps({"spec": {"suspend": False}}))
    eventually(lambda: reason(kubectl, "first", "QuotaReserved") == "QuotaPending", why="it waits again")
    kubelet.learner_ends("second", 0)
    until_running(kubectl, kubelet, "first")
    eventually(partial(_rests, kubectl, "first"), why="its Workload is written no more")


def test_two_jobs_share_tainted_host_through_flavor_toleration(
    kubectl: Kubectl, controller: Controller, team: list[str], nodes: FakeNodes, kubelet: Kubelet
) -> None:
    own = f"{kubectl.namespace}-tainted"
    pool = {**HERE, "pool": own}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    nodes.add(own, gpus=8, labels=pool, taints=[{"key": "nvidia.com/gpu", "value": "here", "effect": "NoSchedule"}])
    with queue(kubectl, own, "tainted", gpus=8, nodeLabels=pool, tolerations=[toleration]):
        for name in ("first", "second"):
            apply_queued(kubectl, name, queue_name="tainted")
            until_running(kubectl, kubelet, name)
            assert _assigned(kubectl, name) == _host(kubelet, name) == own


def test_flavor_without_topology_works_only_in_scheduler_mode(
    kubectl: Kubectl, controller: Controller, team: list[str], nodes: FakeNodes, kubelet: Kubelet
) -> None:
    own = f"{kubectl.namespace}-plain"
    pool = {**HERE, "pool": own}
    nodes.add(own, gpus=4, labels=pool)
    with queue(kubectl, own, "plain", nodeLabels=pool, topologyName=None):
        apply_queued(kubectl, "hosted", queue_name="plain")
        way_out = "set spec.placement.mode to Scheduler"
        eventually(lambda: way_out in quota_message(kubectl, "hosted"), why="it says what to change")
        kubectl("delete", "rmj", "hosted", "--timeout=600s")
        apply_queued(kubectl, "free", queue_name="plain", mode="Scheduler")
        until_running(kubectl, kubelet, "free")
        assert _host(kubelet, "free") == own
        servers = kubelet.pod("free", "rollout") or {}
        assert servers["spec"]["nodeSelector"]["pool"] == own
        apply_queued(kubectl, "second", queue_name="plain", mode="Scheduler")
        eventually(lambda: "insufficient" in quota_message(kubectl, "second"), why="quota is counted")


def test_workload_patch_with_outdated_version_is_refused(
    kubectl: Kubectl, controller: Controller, team: list[str]
) -> None:
    apply_queued(kubectl, "first")
    eventually(lambda: "Admitted" in _true(kubectl, "first"), why="the job is admitted")
    patch = json.dumps({"metadata": {"resourceVersion": "1"}, "status": {"conditions": []}})
    refused = kubectl.run("patch", "workload", "first-quota", "--subresource=status", "--type=merge", "-p", patch)
    assert "the object has been modified" in refused.stderr
    assert "Admitted" in _true(kubectl, "first")


def _rests(kubectl: Kubectl, name: str) -> bool:
    before = _workload(kubectl, name)["metadata"]["resourceVersion"]
    time.sleep(REST_S)  # by the clock: the time between two looks; who calls it looks again
    return bool(_workload(kubectl, name)["metadata"]["resourceVersion"] == before)


def _workload(kubectl: Kubectl, name: str) -> Object:
    return kubectl.get("workload", f"{name}-quota") or {}


def _assigned(kubectl: Kubectl, name: str) -> str:
    assignments = _workload(kubectl, name)["status"]["admission"]["podSetAssignments"]
    hosts = {one["topologyAssignment"]["slices"][0]["valuesPerLevel"][0]["universal"] for one in assignments}
    assert len(assignments) == 2, assignments
    assert len(hosts) == 1, "the servers and the learner are on one node"
    return str(hosts.pop())


def _host(kubelet: Kubelet, name: str) -> str:
    hosts = {(kubelet.pod(name, role) or {})["spec"]["nodeName"] for role in ("rollout", "learner")}
    assert len(hosts) == 1
    return str(hosts.pop())


def _true(kubectl: Kubectl, name: str) -> set[str]:
    conditions = _workload(kubectl, name).get("status", {}).get("conditions", [])
    return {item["type"] for item in conditions if item["status"] == "True"}
