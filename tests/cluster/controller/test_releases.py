"""Two releases of the chart on one cluster, by the real helm; their controllers' pods are objects that never run."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.controller.conftest import CRD_NAME, HERE, ROOT, Controller, Kubectl, chart_rights, eventually, job
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_placement import places

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]  # the definition is the whole cluster's
OF_HELM = "meta.helm.sh/release-namespace"


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
        done = self.run("upgrade", "--install", "stage2", *chart, namespaces, *values)
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
        first("delete", "rmj", "job-3v1", "--timeout=60s")
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
