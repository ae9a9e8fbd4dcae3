"""A job over three nodes, trained in real pods, while nodes lose their power and servers come and go.

STAGE2_NODES=3 pytest -s tests/cluster/controller/kueue/test_jobset_nodes.py
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from local_cluster import teardown
from local_cluster.layout import NODE_NAME, Layout
from tests.cluster.controller.conftest import (
    Controller,
    Kubectl,
    Object,
    chart_rights,
    eventually,
    namespace,
    reason,
)
from tests.cluster.controller.kueue.queues import QUEUE, queue
from tests.support.clusters import ROOT, LocalCluster

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.environ.get("STAGE2_NODES") != "3", reason="minutes, on a cluster of three nodes"),
]
STEPS = 60
STRUCK_STEPS = 120  # a server that comes back loads for the time of some forty
SAVED_EVERY = 4
OFF_S = 20
LOADS_S = 600
HOST = "kubernetes.io/hostname"
HERE_FIRST = {
    "weight": 100,
    "preference": {"matchExpressions": [{"key": HOST, "operator": "In", "values": [NODE_NAME]}]},
}
APART = {
    "topologyKey": HOST,
    "topology": "Exclusive",
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [HERE_FIRST]}},
}
"""Each rollout pod has a node, and the learner's pods share the third; one rollout pod has the first node, where there
is no room for the learner's (`crowded`)."""
Answers = dict[tuple[int, str, int], list[int]]


@dataclass(frozen=True)
class Job:
    """A job, and what it leaves in its output folder."""

    kubectl: Kubectl
    name: str
    folder: Path

    def status(self) -> Object:
        """Its status; it must not fail."""
        found: Object = (self.kubectl.get("rmj", self.name) or {}).get("status", {})
        assert found.get("phase") != "Failed", found
        return found

    def until(self, wanted: str) -> None:
        """Wait for a phase."""
        eventually(lambda: self.status().get("phase") == wanted, why=f"{self.name} is {wanted}", timeout_s=LOADS_S)

    def pods(self, role: str) -> list[Object]:
        """Its pods of a role that have not failed."""
        found = self.kubectl.list("pods", selector=f"stage2.dev/job={self.name},stage2.dev/role={role}")
        return [pod for pod in found if pod["status"]["phase"] != "Failed"]

    def nodes(self, role: str) -> set[str]:
        """The nodes of its pods of a role; none until both pods have one."""
        found = [pod["spec"].get("nodeName") for pod in self.pods(role)]
        return set(found) if len(found) == 2 and all(found) else set()

    def starts(self, role: str) -> dict[str, list[int]]:
        """How often each container of its pods of a role was started again, by the pods' uids."""
        return {
            pod["metadata"]["uid"]: [one["restartCount"] for one in pod["status"].get("containerStatuses", [])]
            for pod in self.pods(role)
        }

    def logged(self, event: str) -> list[Object]:
        """The lines of its log with this event."""
        return [one for one in _lines(self.folder / "stage2_log.jsonl") if one["event"] == event]

    def steps(self) -> list[int]:
        """The steps that it has logged."""
        return [int(one["step"]) for one in self.logged("step")]

    def until_step(self, wanted: int) -> None:
        """Wait until it has logged so many steps."""
        eventually(lambda: len(self.steps()) >= wanted, why=f"{wanted} steps", timeout_s=LOADS_S)

    def rollouts(self) -> list[Object]:
        """Its record of all answers."""
        return [one for path in self.folder.glob("*rollouts.jsonl") for one in _lines(path)]

    def answering(self) -> set[str]:
        """The servers that the newest answers were asked of."""
        newest = max(self.rollouts(), key=lambda one: one["version"], default={"servers": []})
        return set(newest["servers"])

    def answers(self) -> Answers:
        """The ids of each answer, by step and record; a step that was made twice has the same ones twice."""
        found: Answers = {}
        for one in self.rollouts():
            key = one["version"], one["sample_id"], one["seed"]
            assert found.setdefault(key, one["token_ids"]) == one["token_ids"], key
        return found


def _lines(path: Path) -> list[Any]:
    """The whole lines of a file of JSON lines."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}\n")]


@dataclass(frozen=True)
class Jobs:
    """Jobs of the tiny model, whose output all nodes see."""

    kubectl: Kubectl
    output: Path

    def start(
        self, name: str, *, steps: int = STEPS, servers: int = 4, queue: str = "", placement: Object | None = None
    ) -> Job:
        """Apply one: two servers in each rollout pod, and two learner pods of one process each.

        A server computes one answer at a time, and keeps nothing of the one before: so no answer is rounded in another
        way because of others beside it. The learner's pods request more memory than `crowded` leaves.
        """
        made: Object = yaml.safe_load((ROOT / "examples" / "job-3v1-tiny.yaml").read_text())
        made["metadata"] = {"name": name, "labels": {QUEUE: queue} if queue else {}}
        spec = made["spec"]
        spec |= {"engine": "JobSet", "image": "stage2/trainer:dev", "placement": placement or {}}
        spec["rollout"] |= {"servers": servers, "serversPerPod": 2}
        spec["learner"] |= {"nodes": 2, "resources": {"requests": {"cpu": "100m", "memory": "4Gi"}}}
        spec["volumes"] = [{"name": "output", "mountPath": "/output", "persistentVolumeClaim": {"claimName": "output"}}]
        training = spec["config"]["training"]
        del training["eval_steps"]
        training |= {"output_dir": f"/output/{name}", "max_steps": steps, "save_steps": SAVED_EVERY}
        training |= {"lr_scheduler_type": "constant", "learning_rate": 1.0e-3}  # as in a run of another length
        training |= {"eval_strategy": "no", "per_device_train_batch_size": 8, "effective_batch_size": 8}
        vllm = spec["config"]["custom"]["extra"]["rollout_matching"]["vllm"]
        vllm |= {"max_num_seqs": 1, "enable_prefix_caching": False}
        vllm["server"]["learners"] = "sharded"
        self.kubectl.apply(made)
        return Job(self.kubectl, name, self.output / name)


@pytest.fixture(scope="module")
def kubectl(admin: Kubectl) -> Iterator[Kubectl]:
    """kubectl in one namespace for all tests here."""
    with namespace(admin) as made:
        yield made


@pytest.fixture(scope="module")
def output(kubectl: Kubectl, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the claim `output` is: a folder of this machine, which every node mounts, and which outlives its pods."""
    folder, own = tmp_path_factory.mktemp("output"), kubectl.namespace
    folder.chmod(0o777)  # pods have another user
    size = {"storage": "1Gi"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {**shared, "capacity": size, "hostPath": {"path": str(folder), "type": "Directory"}}
    claim = {**shared, "volumeName": own, "resources": {"requests": size}}
    for kind, name, spec in (("PersistentVolume", own, volume), ("PersistentVolumeClaim", "output", claim)):
        kubectl.apply({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, "spec": spec})
    yield folder
    kubectl("delete", "persistentvolume", own, "--wait=false")


@pytest.fixture(scope="module")
def jobs(
    kubectl: Kubectl,
    jobset: None,
    kueue: None,
    on_local_cluster: Path,
    local_cluster: LocalCluster,
    output: Path,
    helm: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Jobs]:
    """What starts jobs: the trainer's image is on every node, and the controller knows neither nodes nor Kueue."""
    local_cluster("build", "trainer")
    folder = tmp_path_factory.mktemp("controller")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(json.dumps(chart_rights(kubectl, helm, "controller.placement=false")))
    options = ("--no-placement", "--progress-seconds=2")
    with Controller(kubeconfig, kubectl.namespace, folder / "log", *options) as controller:
        yield Jobs(kubectl, output)
        kubectl("delete", "rmj", "--all", "--timeout=600s")
    assert "Traceback" not in controller.text(), controller.text()


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> Answers:
    """The answers of a run that nothing happens to."""
    job = jobs.start("calm", placement=APART)
    job.until("Succeeded")
    assert job.steps() == list(range(1, STEPS + 1))
    return job.answers()


@pytest.fixture
def crowded(jobs: Jobs) -> Iterator[None]:
    """A pod that leaves no room for a learner's pod on the control plane's node, which cannot be cut off."""
    kubectl = jobs.kubectl
    allocatable = (kubectl.get("node", NODE_NAME) or {})["status"]["allocatable"]["memory"]
    taken = f"{int(allocatable.removesuffix('Ki')) - 3 * 2**20}Ki"
    secure = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": "pause", "image": "docker.io/stage2/pause:local", "securityContext": secure}
    container |= {"imagePullPolicy": "Never", "resources": {"requests": {"memory": taken}}}
    secure = {"runAsNonRoot": True, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {"nodeName": NODE_NAME, "containers": [container], "securityContext": secure}
    kubectl.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "crowd"}, "spec": spec})
    yield
    kubectl("delete", "pod", "crowd", "--wait=false")


def hold(kubectl: Kubectl, policy: str) -> None:
    """Let the queue admit nothing (`Hold`), or anything that its quota allows (`None`)."""
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    kubectl("patch", "clusterqueue", kubectl.namespace, "--type=merge", f"--patch={patch}")


@contextmanager
def said(what: str, job: Job) -> Iterator[None]:
    """Print what is done to a job and when, and which warnings it has logged afterwards."""
    before, start = len(job.logged("warning")), time.monotonic()
    print(f"\n{what}: after {len(job.steps())} steps")
    yield
    for one in job.logged("warning")[before:]:
        print(f"  {one['message'][:200]}")
    print(f"{what}: {time.monotonic() - start:.0f} s, {len(job.steps())} steps")


def lose_power(local_cluster: LocalCluster, node: str) -> None:
    """Let a node have no power for a while; it goes at once, so that a phase of half a second can be struck."""
    teardown.power_off(Layout.default().node(int(node.rpartition("-")[2])))
    time.sleep(OFF_S)  # by the clock: so long it has no power
    local_cluster("mend")


def test_power_loss_of_nodes_costs_job_only_time(
    undisturbed: Answers, jobs: Jobs, crowded: None, local_cluster: LocalCluster
) -> None:
    kubectl = jobs.kubectl
    with queue(kubectl, kubectl.namespace, gpus=6, topologyName=None, nodeLabels=None):
        hold(kubectl, "Hold")
        job = jobs.start("struck", steps=STRUCK_STEPS, queue="team", placement=APART)
        eventually(lambda: reason(kubectl, "struck", "QuotaReserved") == "QuotaPending", why="it waits in its queue")
        assert job.pods("rollout") == job.pods("learner") == []
        hold(kubectl, "None")
        eventually(lambda: job.nodes("rollout") and job.nodes("learner"), why="all pods have nodes")
        eventually(lambda: all(job.starts("rollout").values()), why="servers load")
        eventually(lambda: reason(kubectl, "struck", "QuotaReserved") == "Admitted", why="Kueue admitted it")
        strike_each_phase(job, local_cluster)
        job.until("Succeeded")
    resumed = job.logged("start")[-1]["step"]
    steps, again = job.steps(), STRUCK_STEPS - resumed
    assert steps[-again:] == list(range(resumed + 1, STRUCK_STEPS + 1))
    assert steps[:-again] == list(range(1, len(steps) - again + 1))
    assert resumed % SAVED_EVERY == 0
    assert 0 <= len(steps) - STRUCK_STEPS <= SAVED_EVERY
    assert {key: ids for key, ids in job.answers().items() if key[0] < STEPS} == undisturbed


def strike_each_phase(job: Job, local_cluster: LocalCluster) -> None:
    """Let nodes lose their power: a rollout pod's while servers load, the learner's, and a rollout pod's in a run."""
    (learning,) = job.nodes("learner")
    serving = min(job.nodes("rollout") - {NODE_NAME})
    assert job.nodes("rollout") | {learning} == {NODE_NAME, serving, learning}
    with said("a serving node is struck while servers load", job):
        lose_power(local_cluster, serving)
        job.until("Running")
    job.until_step(SAVED_EVERY + 1)
    servers, learners = job.starts("rollout"), job.starts("learner")
    with said("the learner's node is struck", job):
        lose_power(local_cluster, learning)
        eventually(lambda: len(job.logged("start")) == 2, why="the learner resumes", timeout_s=LOADS_S)
    assert job.starts("rollout") == servers
    assert not job.starts("learner").keys() & learners.keys()
    learners = job.starts("learner")
    for moment, wait_s in (("in a step", 1.0), ("in a sync", 0.0)):
        job.until_step(len(job.steps()) + 1)  # the next sync begins at once
        time.sleep(wait_s)  # by the clock: a step has no mark inside; a strike at any moment costs no more
        with said(f"a serving node is struck {moment}", job):
            lose_power(local_cluster, serving)
            eventually(lambda: len(job.answering()) == 2, why="two servers answer alone", timeout_s=LOADS_S)
            eventually(lambda: len(job.answering()) == 4, why="all servers answer again", timeout_s=LOADS_S)
    assert job.starts("learner") == learners


def test_servers_can_be_added_and_removed_during_training(undisturbed: Answers, jobs: Jobs) -> None:
    job = jobs.start("scaled", servers=2)
    job.until_step(2)
    first, learners = job.starts("rollout"), job.starts("learner")
    stay = job.answering()
    with said("two servers are added", job):
        jobs.kubectl("scale", "rmj/scaled", "--replicas=4")
        eventually(lambda: len(job.answering()) == 4, why="four servers answer", timeout_s=LOADS_S)
    four = job.answering()
    assert four > stay
    assert job.starts("rollout").items() > first.items()
    with said("they are removed", job):
        jobs.kubectl("scale", "rmj/scaled", "--replicas=2")
        eventually(lambda: job.answering() == stay, why="the first two servers answer alone", timeout_s=LOADS_S)
    assert (job.starts("rollout"), job.starts("learner")) == (first, learners)
    job.until("Succeeded")
    assert job.steps() == list(range(1, STEPS + 1))
    assert {one["server"] for one in job.rollouts()} == four
    assert job.answers() == undisturbed
