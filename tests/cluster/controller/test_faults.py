"""Jobs train, or pretend to, while what they stand on is killed at random, from a seed.

Always: four jobs on nodes that are objects only, while controllers, pods and single servers are killed. With
STAGE2_FAULT_SEED, for minutes and on hack/local-cluster: twenty jobs, every fifth in real pods on the real node, while
the API server, the scheduler, the controller-manager, the kubelet and containerd are killed too.
"""

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from local_cluster.layout import NODE_NAME, Layout
from tests.cluster import objects
from tests.cluster.controller import pretended
from tests.cluster.controller.conftest import HERE, Kubectl, eventually, job
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_availability import Replica
from tests.support.clusters import LocalCluster

PODS = ("learner", "rollout", "rollout", "server")
COMPONENTS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager", "kubelet", "containerd")
SECONDS = float(os.environ.get("STAGE2_FAULT_SECONDS", "200"))
GPUS = 8  # of a pretended node: room for two jobs
OUTCOMES = {0: ("Succeeded", "LearnerSucceeded"), 64: ("Failed", "ConfigurationError")}


def fates(jobs: int) -> dict[str, int]:
    """The exit code of each job's learner: every fifth, from the fourth on, has a configuration that is refused."""
    return {f"job-{index:02}": 64 if index % 5 == 3 else 0 for index in range(jobs)}


@dataclass
class Killer:
    """Kills one thing at a time; what a machine's supervisor would start again is started again."""

    seed: int
    kubectl: Kubectl
    replicas: Sequence[Replica]
    targets: Sequence[str]
    mend: Any = None  # starts components of the local cluster again
    killed: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._drawn: list[str] = []

    def strike(self) -> None:
        """One fault, drawn by the seed; none comes again before all have come."""
        if not self._drawn:
            self._drawn = self._random.sample(self.targets, len(self.targets))
        what = self._drawn.pop()
        if what == "controller":
            replica = self._random.choice(self.replicas)
            replica.stop(kill=True)
            replica.start()
        elif what in COMPONENTS:
            record = Layout.default().records / f"{what}.json"
            os.kill(json.loads(record.read_text())["pid"], signal.SIGKILL)
            time.sleep(self._random.uniform(0.5, 4))  # by the clock: so long the cluster does without it
            self.mend()
        elif not self._pod(what):
            return
        self.killed[what] += 1

    def _pod(self, what: str) -> bool:
        role = "learner" if what == "learner" else "rollout"
        try:
            pods = self.kubectl.list("pods", selector=f"stage2.dev/role={role}")
        except objects.FAILURES:
            return False
        running = [
            pod for pod in pods if pod["status"].get("phase") == "Running" and not (what == "server" and _is_real(pod))
        ]
        if not running:
            return False
        pod = self._random.choice(running)
        name = pod["metadata"]["name"]
        if what == "server":
            statuses = pod["status"]["containerStatuses"]
            statuses[0] |= {"ready": False, "restartCount": statuses[0]["restartCount"] + 1}
            statuses[0]["state"] = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
            with suppress(*objects.FAILURES):
                self.kubectl.set_status("pod", name, {"containerStatuses": statuses})
        else:
            self.kubectl.run("delete", "pod", name, "--wait=false")
        return True


def _is_real(pod: Any) -> bool:
    return bool(pod["spec"].get("nodeName") == NODE_NAME)


@pytest.fixture
def replicas(kubectl: Kubectl, rights: Path, tmp_path: Path) -> Iterator[list[Replica]]:
    made = [Replica(rights, kubectl.namespace, tmp_path / f"controller-{index}.log") for index in range(2)]
    for replica in made:
        replica.start()
    yield made
    for replica in made:
        replica.stop()


def finished(kubectl: Kubectl) -> dict[str, tuple[str, str]]:
    """Phase and reason of every job that has ended."""
    found = {}
    try:
        jobs = kubectl.list("rmj")
    except objects.FAILURES:
        jobs = []
    for item in jobs:
        for condition in item.get("status", {}).get("conditions", []):
            if condition["type"] in ("Succeeded", "Failed"):
                found[item["metadata"]["name"]] = (condition["type"], condition["reason"])
    return found


def endure(
    kubectl: Kubectl, killer: Killer, kubelets: pretended.Kubelets, *, strikes: int, until: float, wait_s: float
) -> None:
    """Strikes while jobs run, and holds what has to be true in the end."""
    with kubelets:
        while killer.killed.total() < strikes and time.monotonic() < until:
            if len(finished(kubectl)) == len(kubelets.fates):
                break
            killer.strike()
            time.sleep(2)
        print(f"seed {killer.seed}: killed {dict(killer.killed)}; {len(finished(kubectl))} jobs have ended")
        eventually(
            lambda: not kubelets.alive() or len(finished(kubectl)) == len(kubelets.fates),
            why="all jobs end",
            timeout_s=wait_s,
        )
    assert finished(kubectl) == {name: OUTCOMES[code] for name, code in kubelets.fates.items()}
    assert kubelets.over_booked == []
    eventually(lambda: not kubectl.list("deployments"), why="servers are released")
    kubectl("delete", "rmj", "--all")
    kinds = "deployments,jobs,services,configmaps,secrets,networkpolicies,pods"
    left = ["get", kinds, "-l", "app.kubernetes.io/managed-by=stage2", "-o", "name"]
    eventually(lambda: not kubectl(*left).strip(), why="nothing is orphaned", timeout_s=150)
    for replica in killer.replicas:
        assert "Traceback" not in replica.text(), replica.text()[-3000:]


def test_jobs_survive_killed_controllers_and_pods(kubectl: Kubectl, nodes: FakeNodes, replicas: list[Replica]) -> None:
    node = nodes.add(f"{kubectl.namespace}-0", gpus=GPUS, labels=HERE)
    kubelets = pretended.Kubelets(kubectl, nodes={node: GPUS}, pretended=frozenset({node}), fates=fates(4), work_s=4.0)
    killer = Killer(7, kubectl, replicas, targets=("controller", *PODS))
    items = [job(name, learner={"gpus": 1, "backoffLimit": 100}) for name in kubelets.fates]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": items})
    endure(kubectl, killer, kubelets, strikes=8, until=time.monotonic() + 120, wait_s=200)
    assert killer.killed["controller"]


@pytest.mark.skipif("STAGE2_FAULT_SEED" not in os.environ, reason="minutes of chaos, for whoever names a seed")
def test_every_job_reaches_its_intended_end_under_random_kills(
    on_local_cluster: Path,
    local_cluster: LocalCluster,
    controller_image: str,
    kubectl: Kubectl,
    nodes: FakeNodes,
    replicas: list[Replica],
) -> None:
    made = {nodes.add(f"{kubectl.namespace}-{index}", gpus=GPUS, labels=HERE): GPUS for index in range(3)}
    kubelets = pretended.Kubelets(
        kubectl, nodes={**made, NODE_NAME: 4}, pretended=frozenset(made), fates=fates(20), work_s=20.0
    )
    killer = Killer(
        int(os.environ["STAGE2_FAULT_SEED"]),
        kubectl,
        replicas,
        targets=("controller", *PODS, *COMPONENTS),
        mend=lambda: local_cluster("mend"),
    )
    kubectl.apply(pretended.CONFIG_MAP)
    items = [
        _real(name, code, controller_image) if index % 5 in (0, 3) and index < 10 else _pretended(name)
        for index, (name, code) in enumerate(kubelets.fates.items())
    ]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": items})
    try:
        endure(kubectl, killer, kubelets, strikes=1000, until=time.monotonic() + SECONDS, wait_s=600)
    finally:
        command = ["kubectl", f"--kubeconfig={on_local_cluster}", "get", "--raw", "/readyz"]
        eventually(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, why="it answers")
    assert set(COMPONENTS) <= set(killer.killed)


def _pretended(name: str) -> dict[str, Any]:
    return job(name, learner={"gpus": 1, "backoffLimit": 100})


def _real(name: str, exit_code: int, image: str) -> dict[str, Any]:
    """A job on the node that has a kubelet and a container runtime of its own."""
    learner = {"gpus": 1, "backoffLimit": 100}
    return job(
        name,
        image=image,
        rollout={"servers": 1, "template": pretended.template("server")},
        learner={**learner, "template": pretended.template("learner", seconds=15, exit_code=exit_code)},
        placement={"nodeSelector": {"kubernetes.io/hostname": NODE_NAME}},
    )
