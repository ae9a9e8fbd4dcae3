"""What tools make of a job: kstatus, the library of Flux, and `kubectl wait`; and how a file edits a job that runs."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, Object, eventually, job, phase, reason
from tests.cluster.controller.test_placement import message
from tests.unit.controller.stages import CURRENT, IN_PROGRESS, STAGES

pytestmark = pytest.mark.in_turns(3, apart=True)

PROGRAM = Path(__file__).parents[2] / "kstatus"


def kstatus(*jobs: Object) -> list[str]:
    """What the library computes of each; a local cluster needs Go anyway."""
    if shutil.which("go") is None:
        pytest.skip("kstatus is built by Go, which is not on PATH")
    done = subprocess.run(
        ["go", "run", "."], cwd=PROGRAM, input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_kstatus_matches_documented_state_in_every_stage() -> None:
    reached = {name: stage.reach() for name, stage in STAGES.items()}
    wanted = {name: stage.kstatus for name, stage in STAGES.items()}
    assert dict(zip(reached, kstatus(*reached.values()), strict=True)) == wanted
    edited = [{**one, "metadata": {**one["metadata"], "generation": 9}} for one in reached.values()]
    assert set(kstatus(*edited)) == {IN_PROGRESS}, "until the controller has seen the edit"


def test_job_unseen_by_controller_is_in_progress_for_kstatus(kubectl: Kubectl) -> None:
    kubectl.apply(job())
    assert kstatus(kubectl.get("rmj", "job-3v1") or {}) == [IN_PROGRESS]


def test_file_edit_with_suspension_changes_running_job(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    def image() -> str | None:
        servers = kubectl.get("deployment", "job-3v1-rollout")
        return servers and servers["spec"]["template"]["spec"]["containers"][0]["image"]

    kubectl.apply(job(image="first:1"))
    kubelet.job_runs("job-3v1")
    kubectl("wait", "--for=condition=Ready", "rmj/job-3v1", "--timeout=600s")
    assert kubectl.run("apply", "--server-side", "-f", "-", stdin=job(image="next:1")).returncode != 0
    kubectl.apply(job(image="next:1", suspend=True))
    kubectl("wait", "--for=condition=Suspended", "rmj/job-3v1", "--timeout=600s")
    eventually(lambda: not kubectl.list("deployments", "jobs", "pods"), why="its children are gone")
    suspended = kubectl.get("rmj", "job-3v1") or {}
    assert kstatus(suspended) == [CURRENT]
    assert suspended["status"]["message"].startswith("spec.suspend is true: no pod exists")
    kubectl.apply(job(image="next:1"))
    eventually(lambda: image() == "next:1", why="it starts with what the file says")
    kubelet.job_runs("job-3v1")
    kubectl("wait", "--for=condition=Ready", "rmj/job-3v1", "--timeout=600s")


def test_field_manager_that_suspended_job_is_reported(kubectl: Kubectl, controller: Controller) -> None:
    kubectl.apply(job())
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    kubectl.apply(job())
    kubectl("wait", "--for=condition=Suspended", "rmj/job-3v1", "--timeout=600s")
    words = "spec.suspend is true (set by kubectl-patch; a file that is applied without it leaves it so): no pod exists"
    eventually(lambda: message(kubectl, "job-3v1").startswith(words), why="it says so")
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", '{"spec": {"suspend": null}}')
    eventually(lambda: phase(kubectl, "job-3v1") != "Suspended", why="it goes on")


def test_drained_node_is_reported_as_drained(
    kubectl: Kubectl, controller: Controller, node: str, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s")
    eventually(lambda: "NodeDrained" in {one["reason"] for one in kubectl.list("events")}, why="an Event says it")
    closest = "is cordoned (kubectl uncordon)"
    eventually(lambda: closest in message(kubectl, "job-3v1"), why="and where it may go")
    assert reason(kubectl, "job-3v1", "Ready") == "NoSingleNodeFits"


def test_ownerless_children_of_deleted_job_are_reported_with_delete_command(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    kubectl("delete", "rmj", "job-3v1", "--cascade=orphan", "--timeout=600s")
    kubectl.apply(job())

    words = "a job of this name was deleted with --cascade=orphan"
    eventually(lambda: words in message(kubectl, "job-3v1"), why="it says so")
    *_, command = message(kubectl, "job-3v1").partition(": kubectl ")
    assert {name.partition("/")[0] for name in command.split()[3:]} >= {"deployment", "job", "secret", "configmap"}
    kubectl(*command.split())
    kubelet.job_runs("job-3v1")
