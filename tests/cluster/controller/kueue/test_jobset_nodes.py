"""A job over three nodes, trained in real pods: Kueue admits its JobSet, two nodes serve, and the third one learns.

STAGE2_NODES=3 pytest -s tests/cluster/controller/kueue/test_jobset_nodes.py
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from local_cluster.layout import NODE_NAME
from tests.cluster.controller.conftest import Controller, Kubectl, Object, eventually, phase, reason
from tests.cluster.controller.kueue.queues import QUEUE, queue
from tests.clusters import ROOT, LocalCluster

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(os.environ.get("STAGE2_NODES") != "3", reason="minutes, on a cluster of three nodes"),
    pytest.mark.timeout(3600),
]
JOB = "wide"
STEPS = 10
OFF_S = 30
LOADS_S = 600


def wide(image: str) -> Object:
    """The tiny example with four servers in two pods, and a learner of two; each Job has a node to itself."""
    made: Object = yaml.safe_load((ROOT / "examples" / "job-3v1-tiny.yaml").read_text())
    made["metadata"] = {"name": JOB, "labels": {QUEUE: "team"}}
    spec = made["spec"]
    spec |= {"engine": "JobSet", "image": image}
    spec["rollout"] |= {"servers": 4, "serversPerPod": 2}
    spec["learner"] |= {"nodes": 2}
    spec["placement"] = {"topologyKey": "kubernetes.io/hostname", "topology": "Exclusive"}
    training = spec["config"]["training"]
    training |= {"max_steps": STEPS, "save_steps": STEPS, "eval_strategy": "no"}
    del training["eval_steps"]
    spec["config"]["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["learners"] = "sharded"
    return made


@pytest.fixture
def trainer(on_local_cluster: Path, local_cluster: LocalCluster) -> str:
    """The trainer's image on every node."""
    local_cluster("build", "trainer")
    return "stage2/trainer:dev"


@pytest.fixture
def queued(kubectl: Kubectl, jobset: None, kueue: None, plain: Controller, trainer: str) -> Iterator[Kubectl]:
    """The job, held back by its queue, which has the cluster's own nodes.

    Kueue goes first: while its API has been without a pod, no namespace can be deleted, JobSet's included.
    """
    with queue(kubectl, kubectl.namespace, gpus=6, topologyName=None, nodeLabels=None):
        hold(kubectl, "Hold")
        kubectl.apply(wide(trainer))
        yield kubectl


def hold(kubectl: Kubectl, policy: str) -> None:
    """Let the queue admit nothing (`Hold`), or anything that its quota allows (`None`)."""
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    kubectl("patch", "clusterqueue", kubectl.namespace, "--type=merge", f"--patch={patch}")


def pods(kubectl: Kubectl, role: str) -> list[Object]:
    """The job's pods of a role, by their names in the network."""
    found = kubectl.list("pods", selector=f"stage2.dev/job={JOB},stage2.dev/role={role}")
    return sorted(found, key=lambda pod: str(pod["spec"]["hostname"]))


def status(kubectl: Kubectl) -> Object:
    """The job's status; it must not fail."""
    found: Object = (kubectl.get("rmj", JOB) or {})["status"]
    assert found["phase"] != "Failed", found
    return found


def test_a_node_without_power_costs_a_job_over_three_nodes_time_alone(
    queued: Kubectl, local_cluster: LocalCluster
) -> None:
    eventually(lambda: reason(queued, JOB, "QuotaReserved") == "QuotaPending", why="it waits in its queue")
    assert queued.list("pods") == []
    hold(queued, "None")
    eventually(lambda: phase(queued, JOB) == "Running", why="the job runs", timeout_s=LOADS_S)
    assert reason(queued, JOB, "QuotaReserved") == "Admitted"
    servers, learners = ([pod["spec"]["nodeName"] for pod in pods(queued, role)] for role in ("rollout", "learner"))
    assert len(servers) == len(learners) == 2
    assert len({*servers, *learners}) == 3
    before = [pod["metadata"]["uid"] for pod in pods(queued, "learner")]
    eventually(lambda: status(queued).get("step", 0) >= 2, why="it trains", timeout_s=LOADS_S)

    lost = next(node for node in servers if node != NODE_NAME)
    local_cluster("cut-off", lost.rpartition("-")[2])
    time.sleep(OFF_S)
    local_cluster("mend")

    eventually(lambda: status(queued)["phase"] == "Succeeded", why="the job succeeds", timeout_s=LOADS_S)
    assert [pod["metadata"]["uid"] for pod in pods(queued, "learner")] == before
    log = queued("logs", pods(queued, "learner")[0]["metadata"]["name"], "--tail=-1")
    records = [json.loads(line) for line in log.splitlines() if line.startswith('{"event"')]
    steps = [record for record in records if record["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    (record,) = [record for record in records if record["event"] == "reproducibility"]
    assert len(set(record["servers"])) == 4
