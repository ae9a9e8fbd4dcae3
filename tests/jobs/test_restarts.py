"""A learner that dies in a real pod, end to end on a cluster: it is started again there, with the GPU in its hand."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters import ROOT, Ran, kubectl, run_job

JOB = "restarts"
STEPS = 30  # the kill may come some steps after the second was seen
OF_LEARNER = f"--selector=stage2.dev/job={JOB},stage2.dev/role=learner"
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
        found: list[dict[str, Any]] = json.loads(kubectl(self._kubeconfig, "get", "pods", OF_LEARNER, "--output=json"))[
            "items"
        ]
        return found


@pytest.fixture(scope="module")
def killed(installed: Path) -> Iterator[tuple[Ran, Killer]]:
    """A job of a few steps without servers, whose learner is killed after the second; removed afterwards."""
    manifest = yaml.safe_load((ROOT / "examples" / "job-colocate-tiny.yaml").read_text())
    manifest["metadata"]["name"] = JOB
    config = manifest["spec"]["config"]
    config["training"] |= {"max_steps": STEPS, "save_steps": 1, "eval_strategy": "no"}
    config["custom"]["train_sample_limit"] = 64
    matching = config["custom"]["extra"]["rollout_matching"]
    matching["rollout_backend"] = "hf"
    del matching["vllm"]
    killer = Killer(installed)
    try:
        yield run_job(installed, manifest, killer), killer
    finally:
        kubectl(installed, "delete", "rmj", JOB, "--ignore-not-found", "--wait")


def test_the_job_succeeds_after_its_learner_has_died(killed: tuple[Ran, Killer]) -> None:
    ran, _ = killed
    status = ran.job["status"]
    assert status["phase"] == "Succeeded", ran.log[-4000:]
    assert status["step"] == status["maxSteps"] == STEPS
    assert status["restarts"] == 1


def test_the_status_tells_the_learners_step_while_it_runs(killed: tuple[Ran, Killer]) -> None:
    _, killer = killed
    assert killer.struck is not None


def test_it_was_started_again_in_its_own_pod_and_container(killed: tuple[Ran, Killer]) -> None:
    ran, killer = killed
    assert killer.struck is not None, ran.log[-4000:]
    (pod,) = killer.pods()
    assert pod["metadata"]["uid"] == killer.struck["metadata"]["uid"]
    (container,) = pod["status"]["containerStatuses"]
    assert container["restartCount"] == 0
    assert "exit code -9; restarting in 10 s (1 of 2)" in ran.log


def test_it_went_on_from_its_last_checkpoint(killed: tuple[Ran, Killer]) -> None:
    ran, _ = killed
    steps = [step["step"] for step in ran.records("step")]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert steps.count(1) == 1, "what was saved is not done again"
