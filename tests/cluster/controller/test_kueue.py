"""Jobs in queues of the real Kueue, built from its module: they wait, run where it says, give way and come back."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.controller.conftest import (
    HERE,
    Controller,
    Kubectl,
    Kubelet,
    Object,
    chart_rights,
    eventually,
    job,
    phase,
    reason,
)
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.clusters import ROOT, LocalCluster

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1800)]  # the first run on a machine builds Kueue
NAME = "workloads.kueue.x-k8s.io"
EXAMPLE = ROOT / "examples" / "queue-kueue.yaml"
QUEUE = "kueue.x-k8s.io/queue-name"
REST_S = 5.0  # nothing makes a pass of its own in it: a job that runs is looked at each ten seconds


@pytest.fixture(scope="session")
def kueue(admin: Kubectl, request: pytest.FixtureRequest, local_cluster: LocalCluster) -> Iterator[None]:
    """Kueue on the cluster; one that it did not have before goes at the end."""
    if admin.get("crd", NAME) is not None:
        yield
        return
    request.getfixturevalue("on_local_cluster")
    try:
        local_cluster("enable", "kueue")
        yield
    finally:
        local_cluster("disable", "kueue")


@pytest.fixture
def team(kueue: None, kubectl: Kubectl, nodes: FakeNodes) -> Iterator[list[str]]:
    """Two nodes of four GPUs, and a queue `team` with a quota of four; the nodes' names."""
    own = kubectl.namespace
    names = [nodes.add(f"{own}-{index}", gpus=4, labels=HERE) for index in range(2)]
    with _queue(kubectl, own):
        yield names


@contextmanager
def _queue(kubectl: Kubectl, own: str, name: str = "team", *, gpus: int = 4, **flavor: Any) -> Iterator[None]:
    made = _example(kubectl.namespace, own, name, gpus=gpus, **flavor)
    try:
        for one in made:
            eventually(partial(_taken, kubectl, one), why="Kueue answers")
        yield
    finally:
        kubectl("delete", "rmj", "--all", "--timeout=600s")
        for one in reversed(made):
            kubectl("delete", one["kind"], one["metadata"]["name"], "--timeout=600s")


def _taken(kubectl: Kubectl, one: Object) -> bool:
    return kubectl.run("apply", "-f", "-", stdin=one).returncode == 0


def _example(namespace: str, own: str, name: str, *, gpus: int, **more: Any) -> list[Object]:
    """The example's objects for one test: under its names, for its nodes, with so many GPUs."""
    topology, flavor, cluster_queue, local_queue = yaml.safe_load_all(EXAMPLE.read_text())
    for made in (topology, flavor, cluster_queue):
        made["metadata"]["name"] = own
    local_queue["metadata"]["name"] = name
    flavor["spec"] |= {"topologyName": own, "nodeLabels": HERE, **more}
    flavor["spec"] = {key: value for key, value in flavor["spec"].items() if value is not None}
    (offered,) = cluster_queue["spec"]["resourceGroups"][0]["flavors"]
    offered["name"] = local_queue["spec"]["clusterQueue"] = own
    local_queue["metadata"]["namespace"] = namespace
    (offered_gpus,) = [one for one in offered["resources"] if one["name"] == "nvidia.com/gpu"]
    offered_gpus["nominalQuota"] = gpus
    return [topology, flavor, cluster_queue, local_queue]


@pytest.fixture
def controller(team: list[str], kubectl: Kubectl, helm: str, tmp_path: Path) -> Iterator[Controller]:
    """A controller that knows Kueue, with the rights that the chart gives it then."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm, "controller.kueue=true")))
    running = Controller(kubeconfig, kubectl.namespace, tmp_path / "controller.log", "--kueue")
    running.start()
    yield running
    running.stop()
    assert "Traceback" not in running.text(), running.text()


@pytest.fixture
def urgent(kubectl: Kubectl) -> Iterator[str]:
    """A PriorityClass above the default."""
    name = f"{kubectl.namespace}-urgent"
    kubectl("create", "priorityclass", name, "--value=1000")
    yield name
    kubectl("delete", "priorityclass", name)


def test_a_job_waits_for_quota_runs_where_kueue_says_and_frees_it_at_its_end(
    kubectl: Kubectl, controller: Controller, team: list[str], kubelet: Kubelet
) -> None:
    _apply(kubectl, "first")
    _runs(kubectl, kubelet, "first")
    assert _assigned(kubectl, "first") == _host(kubelet, "first") in team
    eventually(lambda: "PodsReady" in _true(kubectl, "first"), why="Kueue is told")

    _apply(kubectl, "second")
    eventually(lambda: reason(kubectl, "second", "QuotaReserved") == "QuotaPending", why="the second waits")
    eventually(lambda: "nvidia.com/gpu" in _message(kubectl, "second"), why="it says what it waits for")
    assert kubelet.pod("second", "rollout") is None

    kubelet.learner_ends("first", 0)
    eventually(lambda: phase(kubectl, "first") == "Succeeded", why="the first is done")
    _runs(kubectl, kubelet, "second")
    assert "Finished" in _true(kubectl, "first")


def test_a_preempted_job_gives_everything_up_and_comes_back(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet, urgent: str
) -> None:
    _apply(kubectl, "patient")
    _runs(kubectl, kubelet, "patient")

    _apply(kubectl, "hasty", priority_class=urgent)
    eventually(lambda: reason(kubectl, "patient", "QuotaReserved") == "QuotaPending", why="it is told", timeout_s=60)
    eventually(lambda: kubelet.pod("patient", "learner") is None, why="its learner is gone", timeout_s=60)
    eventually(lambda: kubelet.pod("patient", "rollout") is None, why="its servers are gone", timeout_s=60)
    _runs(kubectl, kubelet, "hasty")

    kubelet.learner_ends("hasty", 0)
    eventually(lambda: phase(kubectl, "hasty") == "Succeeded", why="the hasty one is done")
    _runs(kubectl, kubelet, "patient")
    assert (kubectl.get("rmj", "patient") or {})["status"].get("restarts", 0) == 0, "preemption counts as no failure"


def test_a_job_whose_host_is_drained_gives_its_quota_back_and_gets_another_host(
    kubectl: Kubectl, controller: Controller, team: list[str], kubelet: Kubelet
) -> None:
    _apply(kubectl, "drained")
    _runs(kubectl, kubelet, "drained")
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


def test_a_suspended_job_lends_its_quota_and_waits_for_it_again(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    _apply(kubectl, "first")
    _runs(kubectl, kubelet, "first")
    _apply(kubectl, "second")

    kubectl("patch", "rmj", "first", "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    _runs(kubectl, kubelet, "second")

    kubectl("patch", "rmj", "first", "--type=merge", "-p", json.dumps({"spec": {"suspend": False}}))
    eventually(lambda: reason(kubectl, "first", "QuotaReserved") == "QuotaPending", why="it waits again")
    kubelet.learner_ends("second", 0)
    _runs(kubectl, kubelet, "first")
    eventually(partial(_rests, kubectl, "first"), why="its Workload is written no more")


def test_two_jobs_share_a_tainted_host_by_the_toleration_of_their_flavor(
    kubectl: Kubectl, controller: Controller, team: list[str], nodes: FakeNodes, kubelet: Kubelet
) -> None:
    own = f"{kubectl.namespace}-tainted"
    pool = {**HERE, "pool": own}
    toleration = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    nodes.add(own, gpus=8, labels=pool, taints=[{"key": "nvidia.com/gpu", "value": "here", "effect": "NoSchedule"}])
    with _queue(kubectl, own, "tainted", gpus=8, nodeLabels=pool, tolerations=[toleration]):
        for name in ("first", "second"):
            _apply(kubectl, name, queue="tainted")
            _runs(kubectl, kubelet, name)
            assert _assigned(kubectl, name) == _host(kubelet, name) == own


def test_a_flavor_without_a_topology_takes_a_job_whose_node_the_scheduler_finds(
    kubectl: Kubectl, controller: Controller, team: list[str], nodes: FakeNodes, kubelet: Kubelet
) -> None:
    own = f"{kubectl.namespace}-plain"
    pool = {**HERE, "pool": own}
    nodes.add(own, gpus=4, labels=pool)
    with _queue(kubectl, own, "plain", nodeLabels=pool, topologyName=None):
        _apply(kubectl, "hosted", queue="plain")
        way_out = "set spec.placement.mode to Scheduler"
        eventually(lambda: way_out in _message(kubectl, "hosted"), why="it says what to change", timeout_s=60)
        kubectl("delete", "rmj", "hosted", "--timeout=600s")
        _apply(kubectl, "free", queue="plain", mode="Scheduler")
        _runs(kubectl, kubelet, "free")
        assert _host(kubelet, "free") == own
        servers = kubelet.pod("free", "rollout") or {}
        assert servers["spec"]["nodeSelector"]["pool"] == own
        _apply(kubectl, "second", queue="plain", mode="Scheduler")
        eventually(lambda: "insufficient" in _message(kubectl, "second"), why="quota is counted", timeout_s=60)


def test_what_an_older_version_was_to_be_told_is_refused(
    kubectl: Kubectl, controller: Controller, team: list[str]
) -> None:
    _apply(kubectl, "first")
    eventually(lambda: "Admitted" in _true(kubectl, "first"), why="the job is admitted")
    patch = json.dumps({"metadata": {"resourceVersion": "1"}, "status": {"conditions": []}})
    refused = kubectl.run("patch", "workload", "first-quota", "--subresource=status", "--type=merge", "-p", patch)
    assert "the object has been modified" in refused.stderr
    assert "Admitted" in _true(kubectl, "first")


def _apply(
    kubectl: Kubectl, name: str, *, priority_class: str | None = None, queue: str = "team", mode: str = "Reserve"
) -> None:
    placement: Object = {"nodeSelector": HERE, "mode": mode}
    if priority_class:
        placement["priorityClassName"] = priority_class
    made = job(name, placement=placement)
    made["metadata"]["labels"] = {QUEUE: queue}
    kubectl.apply(made)


def _runs(kubectl: Kubectl, kubelet: Kubelet, name: str) -> None:
    eventually(lambda: kubelet.pod(name, "rollout"), why=f"{name} is admitted: {_message(kubectl, name)}", timeout_s=60)
    kubelet.servers_answer(name)
    eventually(lambda: kubelet.pod(name, "learner"), why=f"the learner of {name} starts")
    kubelet.learner_runs(name)
    eventually(lambda: phase(kubectl, name) == "Running", why=f"{name} runs")


def _rests(kubectl: Kubectl, name: str) -> bool:
    before = _workload(kubectl, name)["metadata"]["resourceVersion"]
    time.sleep(REST_S)
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


def _message(kubectl: Kubectl, name: str) -> str:
    conditions = (kubectl.get("rmj", name) or {}).get("status", {}).get("conditions", [])
    return next((str(item["message"]) for item in conditions if item["type"] == "QuotaReserved"), "")


def _true(kubectl: Kubectl, name: str) -> set[str]:
    conditions = _workload(kubectl, name).get("status", {}).get("conditions", [])
    return {item["type"] for item in conditions if item["status"] == "True"}
