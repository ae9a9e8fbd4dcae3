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

from stage2_controller.state import conditions
from tests.cluster.controller.conftest import (
    CRD_NAME,
    HERE,
    ROOT,
    Controller,
    Kubectl,
    Kubelet,
    chart_rights,
    define,
    eventually,
    job,
    phase,
    reason,
    rights_of_the_release,
    undefine,
)
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_placement import places

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(2)]  # the definition is the whole cluster's
CHART = ROOT / "charts" / "stage2"
OF_HELM = "meta.helm.sh/release-namespace"


@dataclass
class Release:
    """helm for the release `stage2` of one namespace, which it alone serves."""

    helm: str
    kubectl: Kubectl

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        common = [f"--kubeconfig={self.kubectl.kubeconfig}", f"--namespace={self.kubectl.namespace}"]
        return subprocess.run([self.helm, *arguments, *common], capture_output=True, text=True, check=False)

    def install(self, *values: str, chart: Path = CHART) -> str:
        """Installs or upgrades it without waiting for pods; what helm complains about, empty where it does not."""
        namespaces = f'--set-json=controller.namespaces=["{self.kubectl.namespace}"]'
        images = "--set=image.repository=registry.example/team"
        done = self.run("upgrade", "--install", "stage2", str(chart), namespaces, images, *values)
        return done.stderr if done.returncode else ""


@pytest.fixture
def releases(
    admin: Kubectl, definition_is_ours: bool, kubectl: Kubectl, helm: str
) -> Iterator[tuple[Release, Release]]:
    """Two of them, in two namespaces, not installed yet, on a cluster without the definition: helm makes it."""
    if not definition_is_ours:
        pytest.skip("the cluster has the definition of somebody, whose jobs would go with it")
    other = Kubectl(admin.kubeconfig, f"{kubectl.namespace}-b")
    admin("create", "namespace", other.namespace)
    made = Release(helm, kubectl), Release(helm, other)
    undefine(admin)
    yield made
    for release in made:
        release.run("uninstall", "stage2", "--wait")
    undefine(admin)
    define(admin)
    admin("delete", "namespace", other.namespace, "--wait=false")


def test_single_release_owns_crd(releases: tuple[Release, Release], kubectl: Kubectl) -> None:
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


def test_two_releases_serve_same_named_jobs_each_in_own_namespace(
    releases: tuple[Release, Release], helm: str, nodes: FakeNodes, tmp_path: Path
) -> None:
    first, second = (release.kubectl for release in releases)
    define(first)
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


STATES = {
    "2026-11-21": "bcedefa313bc5392b1334651c8b28ae8f74f82f6",
    "2026-11-26": "3f990ed1f548fa6cf1c46652034140adeeef5de6",
    "before JobSet": "d07df751fff7d686cdee902d52f358fdbfa38953",
    "2026-11-27": "a04891dbf3912e21ece31ac30eb89d191ed5c6b1",
}
"""The states of which tests/unit/controller/old has recordings, and the last one before engine JobSet had keys."""
COMPARES_WRITTEN_HASHES = ("before JobSet", "2026-11-27")
"""States that know the hash of another version: they keep the pods of jobs that started after the upgrade."""
LATER = {"stage2.dev/test-later": "yes"}
RUNNING, COLOCATED, WAITING, STOPPED = "running", "colocated", "waiting", "stopped"


@dataclass
class Lives:
    """The jobs of one state of stage2, followed through an upgrade to today's and the rollback."""

    release: Release
    kubectl: Kubectl
    kubelet: Kubelet
    state: Path
    controller: Controller

    def install_state(self) -> None:
        """Install the state's chart, with the policies that it has, and start its controller."""
        assert self.release.install("--set=controller.replicas=0", chart=self.state / "charts" / "stage2") == ""
        eventually(lambda: self.kubectl.run("get", "rmj").returncode == 0, why="the API server serves the definition")

    def follow(self, packages: Path) -> None:
        """Let the controller of a state take over, with the policy of the release that is installed now."""
        self.controller.stop()
        (deployment,) = self.kubectl.list("deployments", selector="app.kubernetes.io/component=controller")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        of_chart = {one["name"]: one["value"] for one in container.get("env", []) if one["name"] == "STAGE2_POLICY"}
        paths = os.pathsep.join(str(packages / folder) for folder in ("crds", "controller"))
        self.controller.environment = {**of_chart, "PYTHONPATH": paths}
        self.controller.start()

    def written(self, name: str, example: str = "job-3v1", **spec: Any) -> dict[str, Any]:
        """A job as its author has it in a file: an example of the state, for the nodes of this test."""
        body: dict[str, Any] = yaml.safe_load((self.state / "examples" / f"{example}.yaml").read_text())
        mounted = [(one["name"], one["mountPath"]) for one in body["spec"]["volumes"]]
        own = {
            "volumes": [{"name": name, "mountPath": path, "emptyDir": {}} for name, path in mounted],
            "placement": {"nodeSelector": HERE},
        }
        return {**body, "metadata": {"name": name}, "spec": {**body["spec"], **own, **spec}}

    def apply(self, body: Any) -> None:
        """Apply a file as most people do."""
        self.kubectl("apply", "-f", "-", stdin=body)

    def runs(self, name: str) -> None:
        """Play the kubelet until a job runs."""
        if self.job(name)["spec"]["rollout"]["servers"]:
            self.kubelet.servers_answer(name)
        self.kubelet.learner_runs(name)
        eventually(lambda: phase(self.kubectl, name) == "Running", why=f"{name} runs")

    def job(self, name: str) -> Any:
        return self.kubectl.get("rmj", name) or {}

    def uids(self, *names: str) -> set[str]:
        """Of the pods of some jobs, and of what made them."""
        found = [self.kubectl.list("pods", "deployments", "jobs", selector=f"stage2.dev/job={name}") for name in names]
        return {one["metadata"]["uid"] for some in found for one in some}

    def edit(self, name: str, **spec: Any) -> None:
        """Write keys of a job, and wait until its status describes them."""
        self.kubectl("patch", "rmj", name, "--type=merge", "-p", json.dumps({"spec": spec}))
        eventually(lambda: self.is_current(name), why=f"the status of {name} follows the edit {spec}")

    def is_current(self, name: str) -> bool:
        found = self.job(name)
        return bool(found["status"].get("observedGeneration") == found["metadata"]["generation"])

    def accepted(self, *names: str) -> list[str]:
        """The jobs that are not accepted, with what is said of them."""
        found = {name: conditions.find(self.job(name).get("status", {}), "Accepted") for name in names}
        return [f"{name}: {one}" for name, one in found.items() if not one or one["status"] != "True"]

    def is_managed(self, where: str) -> None:
        """Whoever controls now: statuses move, and suspension, deadline, time to live and deletion work."""
        self.kubelet.servers_answer(RUNNING, ready=False)
        eventually(lambda: reason(self.kubectl, RUNNING, "RolloutReady") != "ServersReady", why=f"{where}: it moves")
        self.kubelet.servers_answer(RUNNING)
        eventually(lambda: reason(self.kubectl, RUNNING, "RolloutReady") == "ServersReady", why=f"{where}: and back")
        for name in (RUNNING, COLOCATED, WAITING, STOPPED):
            self.edit(name, activeDeadlineSeconds=80_000 + len(where))
        assert self.accepted(RUNNING, COLOCATED, WAITING, STOPPED) == [], where
        assert [phase(self.kubectl, name) for name in (RUNNING, COLOCATED)] == ["Running"] * 2, where
        assert [phase(self.kubectl, name) for name in (WAITING, STOPPED)] == ["Pending", "Suspended"], where
        ends = f"ends-{where}"
        self.edit(ends, suspend=True)
        eventually(lambda: not self.uids(ends), why=f"{where}: suspension ends the pods")
        self.edit(ends, suspend=False)
        self.runs(ends)
        self.edit(ends, activeDeadlineSeconds=1)  # by the clock: it ends by its deadline
        eventually(lambda: reason(self.kubectl, ends, "Failed") == "DeadlineExceeded", why=f"{where}: the deadline")
        self.kubectl("patch", "rmj", ends, "--type=merge", "-p", '{"spec": {"ttlSecondsAfterFinished": 0}}')
        eventually(lambda: not self.job(ends), why=f"{where}: the time to live")
        gone = f"gone-{where}"
        self.kubectl("delete", "rmj", gone, "--timeout=600s")
        eventually(lambda: not self.uids(gone), why=f"{where}: deletion")


@pytest.fixture
def state(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Chart, definition, controller and examples of an earlier state."""
    commit = STATES[request.param]
    archive = ["git", "archive", commit, "charts", "crds", "controller", "examples"]
    found = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"the history of this clone does not reach {commit}")
    (tmp_path / "state").mkdir()
    subprocess.run(["tar", "-x", f"--directory={tmp_path / 'state'}"], input=found.stdout, check=True)
    return tmp_path / "state"


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("state", STATES, indirect=True)
def test_upgrade_and_rollback_keep_jobs_running_and_editable(
    releases: tuple[Release, Release],
    state: Path,
    kubectl: Kubectl,
    kubelet: Kubelet,
    nodes: FakeNodes,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    for number in range(8):
        nodes.add(f"{kubectl.namespace}-{number}", gpus=16, labels=HERE)
    release, _ = releases
    rights = tmp_path / "kubeconfig"
    controller = Controller(rights, kubectl.namespace, tmp_path / "controller.log", "--progress-seconds=2")
    lives = Lives(release, kubectl, kubelet, state, controller)
    try:
        lives.install_state()
        rights.write_text(json.dumps(rights_of_the_release(kubectl)))
        lives.follow(state)
        started = [RUNNING, "ends-upgraded", "gone-upgraded", "ends-back", "gone-back"]
        for name in started:
            lives.apply(lives.written(name))
        lives.apply(lives.written(COLOCATED, "job-colocate"))
        lives.apply(lives.written(WAITING, placement={"nodeSelector": {**HERE, **LATER}}))
        lives.apply(lives.written(STOPPED, suspend=True))
        for name in (*started, COLOCATED):
            lives.runs(name)
        eventually(lambda: phase(kubectl, WAITING) == "Pending", why="it waits for a node")
        eventually(lambda: phase(kubectl, STOPPED) == "Suspended", why="it has no pods")
        before = lives.uids(RUNNING, COLOCATED)
        assert len(before) == 6, "three pods and what made them"

        controller.stop()
        assert release.install("--set=controller.replicas=0") == ""
        lives.kubectl("patch", "rmj", RUNNING, "--type=merge", "-p", '{"spec": {"activeDeadlineSeconds": 70000}}')
        lives.follow(ROOT)
        lives.apply(lives.written(RUNNING, activeDeadlineSeconds=75_000))
        lives.apply(lives.written(STOPPED, suspend=True, activeDeadlineSeconds=75_000))
        lives.is_managed("upgraded")
        assert lives.uids(RUNNING, COLOCATED) == before
        lives.apply(lives.written("new"))
        lives.runs("new")
        new = lives.uids("new")

        controller.stop()
        done = release.run("rollback", "stage2", "1")
        assert done.returncode == 0, done.stderr
        lives.follow(state)
        lives.apply(lives.written(RUNNING, activeDeadlineSeconds=76_000))
        lives.is_managed("back")
        assert lives.uids(RUNNING, COLOCATED) == before
        eventually(lambda: lives.accepted("new") == [], why="what started in between is managed, too")
        if request.node.callspec.params["state"] in COMPARES_WRITTEN_HASHES:
            assert lives.uids("new") == new
        nodes.add(f"{kubectl.namespace}-later", gpus=16, labels={**HERE, **LATER})
        lives.edit(STOPPED, suspend=False)
        for name in (WAITING, STOPPED):
            lives.runs(name)
    finally:
        controller.stop()
        kubectl("delete", "rmj", "--all", "--timeout=600s", check=False)
    assert "Traceback" not in controller.text(), controller.text()


def test_drain_evicts_single_controller_at_a_time(
    releases: tuple[Release, Release], kubectl: Kubectl, nodes: FakeNodes
) -> None:
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
