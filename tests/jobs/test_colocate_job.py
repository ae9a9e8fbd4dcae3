"""A job whose learner makes its own rollouts, end to end on a cluster; the learner dies once, and starts again.

It is the colocated example, cut to fewer steps. What kills it kills no server: its vLLM is in its own process.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import Ran, example_run, kubectl, whole_record

pytestmark = pytest.mark.in_turns(2)
JOB = "job-colocate-tiny"
STEPS = 24  # the kill may come some steps after the second was seen
OWNED = f"stage2.dev/job={JOB}"
OF_LEARNER = f"--selector={OWNED},stage2.dev/role=learner"
# What an out-of-memory kill does to the learner itself, whatever has started it.
KILL = """
import os, pathlib, signal
words = {int(one.parent.name): one.read_bytes().split(b"\\0") for one in pathlib.Path("/proc").glob("[0-9]*/cmdline")}
(starter,) = [pid for pid, its in words.items() if any(word.startswith(b"--restarts") for word in its)]
learners = pathlib.Path(f"/proc/{starter}/task/{starter}/children").read_text().split()
for pid in learners:
    os.kill(int(pid), signal.SIGKILL)
print(len(learners))
"""


class Killer:
    """Kills the learner once it has saved its first step: the second is done.

    It reads the step in the job's status, where the controller writes what the running learner reports over TLS.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self.struck: dict[str, Any] | None = None  # the pod in which it was killed

    def __call__(self, job: Mapping[str, Any]) -> None:
        if self.struck is None and 2 <= job.get("status", {}).get("step", 0) < STEPS:
            (pod,) = self.pods()
            command = ("exec", pod["metadata"]["name"], "--container=learner", "--", "python3", "-c", KILL)
            assert kubectl(self._kubeconfig, *command).strip() == "1"
            self.struck = pod

    def pods(self) -> list[dict[str, Any]]:
        """The learner's pods, those that have ended included."""
        listed = kubectl(self._kubeconfig, "get", "pods", OF_LEARNER, "--output=json")
        found: list[dict[str, Any]] = json.loads(listed)["items"]
        return found


@pytest.fixture(scope="module")
def killer(installed: Path) -> Killer:
    return Killer(installed)


@pytest.fixture(scope="module")
def ran(installed: Path, killer: Killer) -> Iterator[Ran]:
    """The example, cut to fewer steps, run to its end with a learner that is killed after its second step."""

    def smaller(config: dict[str, Any]) -> None:
        config["training"] |= {"max_steps": STEPS, "eval_steps": STEPS, "save_steps": 1}
        config["custom"] |= {"train_sample_limit": 64, "val_sample_limit": 4}

    with example_run(installed, JOB, smaller, killer) as ran:
        yield ran


def test_job_succeeds_after_all_steps(ran: Ran) -> None:
    status = ran.job["status"]
    assert status["phase"] == "Succeeded", ran.log[-4000:]
    assert status["step"] == status["maxSteps"] == STEPS
    assert status["restarts"] == 1, ran.log[-4000:]


def test_status_reports_step_of_running_learner(ran: Ran, killer: Killer) -> None:
    assert killer.struck is not None, ran.log[-4000:]


def test_killed_learner_restarts_in_same_pod_and_container(ran: Ran, killer: Killer) -> None:
    assert killer.struck is not None, ran.log[-4000:]
    (pod,) = killer.pods()
    assert pod["metadata"]["uid"] == killer.struck["metadata"]["uid"]
    (container,) = pod["status"]["containerStatuses"]
    assert container["restartCount"] == 0
    assert "exit code -9; restarting in 10 s (1 of 2)" in ran.log


def test_restarted_learner_resumes_from_last_checkpoint(ran: Ran) -> None:
    steps = [step["step"] for step in ran.records("step")]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert steps.count(1) == 1, "what was saved is not done again"


def test_learner_has_gpu_and_job_has_no_servers(ran: Ran, installed: Path) -> None:
    deployments, services, jobs = (
        json.loads(kubectl(installed, "get", kind, f"--selector={OWNED}", "--output=json"))["items"]
        for kind in ("deployments", "services", "jobs")
    )
    assert deployments == []
    assert [service for service in services if "rollout" in service["metadata"]["name"]] == []
    (learner,) = jobs
    (container,) = learner["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_reproducibility_record_lists_no_servers(ran: Ran) -> None:
    record = whole_record(ran.records("reproducibility"), merge=None)
    assert record["servers"] == []
    assert record["dataset"]["records"] == 64


def test_every_step_logs_rollouts_of_weights_it_starts_from(ran: Ran) -> None:
    for step in ran.records("step"):
        assert step["sync/version"] == step["step"] - 1
        assert step["loss"] > 0
        assert 0 < step["packing/post_rollout_fill"] <= 1
        assert step["rollout/gt_objects"] > 0
        assert step["rollout/gen_new_tokens_total"] > 0
        assert step["time/rollout_generate_s"] > 0
        assert step["memory/peak_bytes"] > 0


def test_evaluation_runs_before_and_after_training(ran: Ran) -> None:
    assert [evaluation["step"] for evaluation in ran.records("evaluation")] == [0, STEPS]
