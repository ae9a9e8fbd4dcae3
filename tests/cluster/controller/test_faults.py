"""Twenty jobs pretend to train while everything around them is killed at random, from a seed (STAGE2_FAULT_SEED).

Killed: both controllers in turn, the API server, the scheduler and the controller-manager of the local cluster, rollout
pods, learner pods and single servers. The nodes are objects only; a thread plays their kubelets.
"""

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from local_cluster import processes
from local_cluster.layout import Layout
from tests.cluster.controller.conftest import HERE, Kubectl, eventually, job
from tests.cluster.controller.fake_nodes import FakeNodes
from tests.cluster.controller.test_availability import Replica

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif("STAGE2_FAULT_SEED" not in os.environ, reason="minutes of chaos, for whoever names a seed"),
]
SEED = int(os.environ.get("STAGE2_FAULT_SEED", "7"))
SECONDS = float(os.environ.get("STAGE2_FAULT_SECONDS", "150"))
JOBS = 20
NODES, GPUS, OF_A_JOB = 3, 8, 4
WORK_S = 8.0  # that a learner has to run in all, over its restarts
COMPONENTS = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
FATES = {name: 64 if index % 5 == 4 else 0 for index, name in enumerate(f"job-{i:02}" for i in range(JOBS))}


class PretendedKubelets(threading.Thread):
    """Starts the containers of every bound pod, lets learners work, and ends them as their job's fate demands."""

    def __init__(self, kubectl: Kubectl) -> None:
        super().__init__(daemon=True)
        self._kubectl = kubectl
        self._done_s: Counter[str] = Counter()  # the checkpoint of each job
        self._seen: dict[str, float] = {}
        self.over_booked: list[str] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        """Until stopped; an API server that is away is asked again."""
        while not self.stopped.wait(0.7):
            listed = self._kubectl.run("get", "pods,deployments", "-o", "json")
            if listed.returncode == 0:
                self._look(json.loads(listed.stdout)["items"])

    def _look(self, items: list[dict[str, Any]]) -> None:
        deployments = [item for item in items if item["kind"] == "Deployment"]
        on = Counter(item["metadata"]["annotations"]["stage2.dev/node"] for item in deployments)
        self.over_booked += [node for node, count in on.items() if count * OF_A_JOB > GPUS]
        for pod in items:
            phase = pod.get("status", {}).get("phase")
            if pod["kind"] == "Pod" and pod["spec"].get("nodeName") and phase not in ("Succeeded", "Failed"):
                self._live(pod)

    def _live(self, pod: dict[str, Any]) -> None:
        uid, labels = pod["metadata"]["uid"], pod["metadata"]["labels"]
        if "deletionTimestamp" in pod["metadata"]:
            return  # FakeNodes confirms it
        if labels["stage2.dev/role"] == "rollout" or uid not in self._seen:
            self._started(pod, running=True)
        if labels["stage2.dev/role"] == "learner":
            now, name = time.monotonic(), labels["stage2.dev/job"]
            self._done_s[name] += now - self._seen.get(uid, now)
            self._seen[uid] = now
            if self._done_s[name] >= WORK_S:
                self._started(pod, running=False, exit_code=FATES[name])

    def _started(self, pod: dict[str, Any], *, running: bool, exit_code: int = 0) -> None:
        ended = {"exitCode": exit_code, "reason": "Completed", "message": "pretended"}
        state: dict[str, Any] = {"running": {"startedAt": "2026-01-01T00:00:00Z"}} if running else {"terminated": ended}
        before = {item["name"]: item for item in pod["status"].get("containerStatuses", [])}
        if running and before and all("running" in item["state"] for item in before.values()):
            return
        statuses = [
            {
                "name": item["name"],
                "image": "x",
                "imageID": "x",
                "ready": running,
                "restartCount": before.get(item["name"], {}).get("restartCount", 0),
                "state": state,
            }
            for item in pod["spec"]["containers"]
        ]
        phase = "Running" if running else ("Failed" if exit_code else "Succeeded")
        patch = json.dumps({"status": {"phase": phase, "containerStatuses": statuses}})
        self._kubectl.run("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--type=merge", "-p", patch)


class Killer:
    """Kills one thing at a time; what a cluster's own supervisor would start again is started again."""

    def __init__(self, kubectl: Kubectl, replicas: list[Replica], layout: Layout) -> None:
        self._random = random.Random(SEED)
        self._kubectl = kubectl
        self._replicas = replicas
        self._layout = layout
        self.killed: Counter[str] = Counter()

    def strike(self) -> None:
        """One fault, drawn by the seed."""
        what = self._random.choice(("controller", "learner", "rollout", "rollout", "server", *COMPONENTS))
        self.killed[what] += 1
        if what == "controller":
            replica = self._random.choice(self._replicas)
            replica.stop(kill=True)
            replica.start()
        elif what in COMPONENTS:
            self._component(what)
        else:
            self._pod(what)

    def _component(self, name: str) -> None:
        record = json.loads((self._layout.records / f"{name}.json").read_text())
        argv = Path(f"/proc/{record['pid']}/cmdline").read_bytes().split(b"\0")[:-1]
        pairs = Path(f"/proc/{record['pid']}/environ").read_bytes().split(b"\0")[:-1]
        environment = dict(pair.decode().split("=", 1) for pair in pairs)
        os.kill(record["pid"], signal.SIGKILL)
        time.sleep(self._random.uniform(0.5, 4))
        processes.spawn(self._layout, name, [part.decode() for part in argv], env=environment)

    def _pod(self, what: str) -> None:
        role = "learner" if what == "learner" else "rollout"
        listed = self._kubectl.run("get", "pods", "-l", f"stage2.dev/role={role}", "-o", "json")
        pods = json.loads(listed.stdout)["items"] if listed.returncode == 0 else []
        running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
        if not running:
            return
        pod = self._random.choice(running)
        name = pod["metadata"]["name"]
        if what == "server":
            statuses = pod["status"]["containerStatuses"]
            statuses[0] |= {"ready": False, "restartCount": statuses[0]["restartCount"] + 1}
            statuses[0]["state"] = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
            patch = json.dumps({"status": {"containerStatuses": statuses}})
            self._kubectl.run("patch", "pod", name, "--subresource=status", "--type=merge", "-p", patch)
        else:
            self._kubectl.run("delete", "pod", name, "--wait=false")


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
    listed = kubectl.run("get", "rmj", "-o", "json")
    found = {}
    for item in json.loads(listed.stdout)["items"] if listed.returncode == 0 else []:
        for condition in item.get("status", {}).get("conditions", []):
            if condition["type"] in ("Succeeded", "Failed"):
                found[item["metadata"]["name"]] = (condition["type"], condition["reason"])
    return found


def test_every_job_ends_as_it_was_made_to_whatever_is_killed(
    on_local_cluster: Path, kubectl: Kubectl, nodes: FakeNodes, replicas: list[Replica], tmp_path: Path
) -> None:
    for index in range(NODES):
        nodes.add(f"{kubectl.namespace}-{index}", gpus=GPUS, labels=HERE)
    kubelets = PretendedKubelets(kubectl)
    kubelets.start()
    learner = {"gpus": 1, "backoffLimit": 100}
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": [job(name, learner=learner) for name in FATES]})
    killer = Killer(kubectl, replicas, Layout.default())
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and len(finished(kubectl)) < JOBS:
        killer.strike()
        time.sleep(2)
    eventually(lambda: len(finished(kubectl)) == JOBS, why=f"all jobs end; {finished(kubectl)}", timeout_s=600)
    kubelets.stopped.set()
    kubelets.join()
    expected = {0: ("Succeeded", "LearnerSucceeded"), 64: ("Failed", "ConfigurationError")}
    assert finished(kubectl) == {name: expected[code] for name, code in FATES.items()}
    assert kubelets.over_booked == []
    eventually(lambda: not kubectl.list("deployments"), why="servers are released")
    kubectl("delete", "rmj", "--all")
    kinds = "deployments,jobs,services,configmaps,secrets,networkpolicies,pods"
    left = ["get", kinds, "-l", "app.kubernetes.io/managed-by=stage2", "-o", "name"]
    eventually(lambda: not kubectl(*left).strip(), why="nothing is orphaned", timeout_s=120)
    print(f"seed {SEED}: killed {dict(killer.killed)}")  # noqa: T201 - shown with -s
    for replica in replicas:
        assert "Traceback" not in replica.text(), replica.text()[-3000:]


def test_the_cluster_is_whole_after_the_faults(on_local_cluster: Path) -> None:
    command = ["kubectl", f"--kubeconfig={on_local_cluster}", "get", "--raw", "/readyz"]
    eventually(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, why="it answers")
