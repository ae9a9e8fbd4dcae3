"""Two releases of the chart on one cluster, by the real helm; their controllers' pods are objects that never run."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.controller.conftest import (
    CRD,
    CRD_NAME,
    HERE,
    ROOT,
    Controller,
    Kubectl,
    Kubelet,
    chart_rights,
    eventually,
    job,
    phase,
    rights_of_the_release,
)
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_placement import places

pytestmark = pytest.mark.alone  # the definition is the whole cluster's
OF_HELM = "meta.helm.sh/release-namespace"
EARLIER = "bcedefa"
"""A state whose running jobs a later one restarted: their hashes depend on the defaults of whoever computes them."""


@dataclass
class Release:
    """helm for the release `stage2` of one namespace, which it alone serves."""

    helm: str
    kubectl: Kubectl

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        common = [f"--kubeconfig={self.kubectl.kubeconfig}", f"--namespace={self.kubectl.namespace}"]
        return subprocess.run([self.helm, *arguments, *common], capture_output=True, text=True, check=False)

    def install(self, *values: str) -> str:
        """Installs or upgrades it without waiting for pods; what helm complains about, empty where it does not."""
        namespaces = f'--set-json=controller.namespaces=["{self.kubectl.namespace}"]'
        # What refuses unknown keys goes with its release, and is other tests' too.
        chart = [str(ROOT / "charts" / "stage2"), "--take-ownership", "--set=crd.refuseUnknownKeys=false"]
        images = "--set=image.repository=registry.example/team"
        done = self.run("upgrade", "--install", "stage2", *chart, namespaces, images, *values)
        return done.stderr if done.returncode else ""


@pytest.fixture
def releases(admin: Kubectl, kubectl: Kubectl, helm: str) -> Iterator[tuple[Release, Release]]:
    """Two of them, in two namespaces, not installed yet; the definition is nobody's again afterwards."""
    other = Kubectl(admin.kubeconfig, f"{kubectl.namespace}-b")
    admin("create", "namespace", other.namespace)
    made = Release(helm, kubectl), Release(helm, other)
    yield made
    for release in made:
        release.run("uninstall", "stage2", "--wait")
    admin("annotate", "crd", CRD_NAME, f"{OF_HELM}-", "meta.helm.sh/release-name-")
    admin("delete", "namespace", other.namespace, "--wait=false")


def test_one_release_owns_the_definition(releases: tuple[Release, Release], kubectl: Kubectl) -> None:
    first, second = releases
    assert first.install("--set=controller.replicas=0") == ""
    owner = (kubectl.get("crd", CRD_NAME) or {})["metadata"]["annotations"][OF_HELM]
    assert owner == kubectl.namespace
    refused = second.install("--set=controller.replicas=0")
    assert f"belongs to the release stage2 in the namespace {kubectl.namespace}; set crd.install=false" in refused
    assert first.install("--set=controller.replicas=0") == "", "its own upgrade is none of that"

    named = ("--set=controller.replicas=0", "--set=crd.install=false", "--set=nameOverride=other")
    assert second.install(*named) == ""
    names = {release.kubectl.namespace: cluster_roles(release.kubectl) for release in releases}
    assert names[second.kubectl.namespace].isdisjoint(names[first.kubectl.namespace])
    assert all(len(roles) == 4 for roles in names.values()), "its controller's, and three of people"
    (deployment,) = second.kubectl.list("deployments")
    assert "other" in deployment["metadata"]["name"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["stage2.dev/role"] == "controller"
    first.run("uninstall", "stage2", "--wait")
    assert kubectl.run("create", "--dry-run=server", "-f", "-", stdin=job()).returncode == 0, "the definition stays"
    assert second.kubectl.list("deployments") != [], "and so does the other release"


def test_controllers_of_two_releases_serve_jobs_of_one_name_each_in_its_own_namespace(
    releases: tuple[Release, Release], helm: str, nodes: FakeNodes, tmp_path: Path
) -> None:
    first, second = (release.kubectl for release in releases)
    node = nodes.add(f"{first.namespace}-node", gpus=8, labels=HERE)
    running = [_controller(kubectl, helm, tmp_path) for kubectl in (first, second)]
    try:
        for kubectl in (first, second):
            kubectl.apply(job())
        for kubectl in (first, second):
            eventually(lambda its=kubectl: places(its, "job-3v1") == [node] * 2, why="both pods are on the node")
        before = [one["metadata"]["uid"] for one in second.list("deployments", "jobs", "pods")]
        first("delete", "rmj", "job-3v1", "--timeout=600s")
        eventually(lambda: not first.list("deployments", "jobs", "pods"), why="what was the first one's is gone")
        assert [one["metadata"]["uid"] for one in second.list("deployments", "jobs", "pods")] == before
    finally:
        for controller in running:
            controller.stop()
        roles = [f"{second.namespace}.stage2{role}" for role in ("", "-view", "-edit", "-admin")]
        second("delete", "clusterrole,clusterrolebinding", *roles, "--ignore-not-found")
    for controller in running:
        assert not re.search("forbidden|Traceback", controller.text()), controller.text()


def _controller(kubectl: Kubectl, helm: str, folder: Path) -> Controller:
    rights = folder / f"{kubectl.namespace}.kubeconfig"
    rights.write_text(json.dumps(chart_rights(kubectl, helm)))
    made = Controller(rights, kubectl.namespace, folder / f"{kubectl.namespace}.log")
    made.start()
    return made


def cluster_roles(kubectl: Kubectl) -> set[str]:
    """The cluster's roles that a release of this namespace has made."""
    found = json.loads(kubectl("get", "clusterroles", "-o", "json"))["items"]
    mine = [one for one in found if one["metadata"].get("annotations", {}).get(OF_HELM) == kubectl.namespace]
    return {one["metadata"]["name"] for one in mine}


@pytest.fixture
def earlier(kubectl: Kubectl, tmp_path: Path) -> Iterator[Path]:
    """Chart, definition, controller and examples of an earlier state, on a cluster that has its definition alone."""
    archive = ["git", "archive", EARLIER, "charts", "crds", "controller", "examples"]
    found = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history of this clone does not reach {EARLIER}")
    subprocess.run(["tar", "-x", f"--directory={tmp_path}"], input=found.stdout, check=True)
    kubectl("replace", "-f", str(tmp_path / "crds" / CRD.name))
    yield tmp_path
    kubectl("replace", "-f", str(CRD))


def _leave_to_helm(kubectl: Kubectl) -> None:
    """Make helm the only manager of the definition's fields, as where it has created the definition."""
    managers = json.loads(kubectl("get", "crd", CRD_NAME, "--show-managed-fields", "-o", "json"))["metadata"]
    (helm,) = [one for one in managers["managedFields"] if one["manager"] == "helm"]
    kubectl("patch", "crd", CRD_NAME, "--type=merge", "-p", json.dumps({"metadata": {"managedFields": [helm]}}))


NAMES = ("job-3v1", "job-colocate")


def _example(earlier: Path, name: str) -> dict[str, Any]:
    """One of its example jobs, with folders that any node has, for the nodes of this test."""
    written: dict[str, Any] = yaml.safe_load((earlier / "examples" / f"{name}.yaml").read_text())
    volumes = [
        {"name": one["name"], "mountPath": one["mountPath"], "emptyDir": {}} for one in written["spec"]["volumes"]
    ]
    return {**written, "spec": {**written["spec"], "volumes": volumes, "placement": {"nodeSelector": HERE}}}


def test_an_upgrade_from_an_earlier_release_and_its_rollback_leave_running_jobs_alone(
    releases: tuple[Release, Release],
    earlier: Path,
    kubectl: Kubectl,
    kubelet: Kubelet,
    node: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, _ = releases
    values = ("--set=controller.replicas=0", f'--set-json=controller.namespaces=["{kubectl.namespace}"]')
    done = release.run("install", "stage2", str(earlier / "charts" / "stage2"), "--take-ownership", *values)
    assert done.returncode == 0, done.stderr
    _leave_to_helm(kubectl)
    kubectl("label", "namespace", kubectl.namespace, "stage2.dev/unguarded=")  # it has keys that are gone today
    rights = tmp_path / "kubeconfig"
    rights.write_text(json.dumps(rights_of_the_release(kubectl)))
    controller = Controller(rights, kubectl.namespace, tmp_path / "controller.log", "--progress-seconds=2")
    path_now = os.environ.get("PYTHONPATH", "")
    path_then = os.pathsep.join(str(earlier / folder) for folder in ("crds", "controller"))

    def follow(path: str, deadline_s: int) -> None:
        """The controller of the release takes over, and an edit that no pod is made of shows that it has."""
        controller.stop()
        monkeypatch.setenv("PYTHONPATH", path)
        controller.start()
        for name in NAMES:
            edit = json.dumps({"spec": {"activeDeadlineSeconds": deadline_s}})
            kubectl("patch", "rmj", name, "--type=merge", "-p", edit)
            eventually(lambda its=name: _is_current(kubectl, its), why=f"the edit of {name} is seen")

    monkeypatch.setenv("PYTHONPATH", path_then)
    controller.start()
    try:
        for name in NAMES:
            kubectl("apply", "-f", "-", stdin=_example(earlier, name))
        kubelet.servers_answer("job-3v1")
        for name in NAMES:
            kubelet.learner_runs(name)
            eventually(lambda its=name: phase(kubectl, its) == "Running", why=f"{name} runs")
        before = _uids(kubectl)
        assert len(before) == 6, "three pods and what made them"
        assert "currentHash" not in (kubectl.get("rmj", "job-3v1") or {})["status"], "an earlier controller wrote it"

        assert release.install("--set=controller.replicas=0") == ""
        follow(path_now, 80_000)
        assert "currentHash" in (kubectl.get("rmj", "job-3v1") or {})["status"], "today's controller wrote it"
        assert ([phase(kubectl, name) for name in NAMES], _uids(kubectl)) == (["Running"] * 2, before)

        done = release.run("rollback", "stage2", "1")
        assert done.returncode == 0, done.stderr
        follow(path_then, 90_000)
        assert ([phase(kubectl, name) for name in NAMES], _uids(kubectl)) == (["Running"] * 2, before)
    finally:
        controller.stop()
        kubectl("delete", "rmj", "--all", "--timeout=600s")
    assert "Traceback" not in controller.text(), controller.text()


def _uids(kubectl: Kubectl) -> set[str]:
    """Of the jobs' pods, and of what made them."""
    return {one["metadata"]["uid"] for one in kubectl.list("pods", "deployments", "jobs", selector="stage2.dev/job")}


def _is_current(kubectl: Kubectl, name: str) -> bool:
    found = kubectl.get("rmj", name) or {}
    return bool(found["status"].get("observedGeneration") == found["metadata"]["generation"])


def test_a_drain_takes_one_controller(releases: tuple[Release, Release], kubectl: Kubectl, nodes: FakeNodes) -> None:
    nodes.add(f"{kubectl.namespace}-node", labels=HERE)
    release, _ = releases
    assert release.install(f"--set-json=controller.nodeSelector={json.dumps(HERE)}") == ""
    pods = eventually(lambda: ready_pods(kubectl, 2), why="two controllers have a node")
    budget = lambda: (kubectl.get("pdb", "stage2") or {}).get("status", {})  # noqa: E731
    eventually(lambda: budget().get("disruptionsAllowed") == 1, why="one of two may go")
    assert evict(kubectl, pods[0]).returncode == 0
    eventually(lambda: budget().get("disruptionsAllowed") == 0, why="it is missed")
    refused = evict(kubectl, pods[1])
    assert "Cannot evict pod as it would violate the pod's disruption budget" in refused.stderr
    assert kubectl.get("pod", pods[1]) is not None
    eventually(lambda: ready_pods(kubectl, 2), why="another one has come")
    eventually(lambda: budget().get("disruptionsAllowed") == 1, why="then the other may go")
    assert evict(kubectl, pods[1]).returncode == 0


def ready_pods(kubectl: Kubectl, number: int) -> list[str] | None:
    """Make the controllers' pods that have a node ready, as a kubelet would; their names, once there are so many."""
    pods = kubectl.list("pods", selector="app.kubernetes.io/component=controller")
    here = [pod for pod in pods if pod["spec"].get("nodeName") and "deletionTimestamp" not in pod["metadata"]]
    conditions: list[dict[str, Any]] = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
    for pod in here:
        kubectl.set_status("pod", pod["metadata"]["name"], {"phase": "Running", "conditions": conditions})
    return [pod["metadata"]["name"] for pod in here] if len(here) == number else None


def evict(kubectl: Kubectl, pod: str) -> subprocess.CompletedProcess[str]:
    """Ask for a pod's eviction, as `kubectl drain` does."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": kubectl.namespace}}
    where = f"/api/v1/namespaces/{kubectl.namespace}/pods/{pod}/eviction"
    return kubectl.run("create", f"--raw={where}", "-f", "-", stdin=body)
