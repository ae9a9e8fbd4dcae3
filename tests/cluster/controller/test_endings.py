"""What can never change, what ends a job, and what does not count as a failure of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from stage2_api.crd import FROZEN
from stage2_api.errors import EXIT_UNAVAILABLE
from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, Object, eventually, job, phase, reason

CHANGES: dict[str, Any] = {
    "image": "another:1",
    "gpuResource": "amd.com/gpu",
    "rollout": {"servers": 2},
    "learner": {"backoffLimit": 5},
    "placement": {"priorityClassName": "another"},
    "volumes": [{"name": "data", "mountPath": "/data", "hostPath": {"path": "/elsewhere"}}],
    "tls": {"enabled": False},
    "config": {"training": {"max_steps": 11}},
}


def test_frozen_fields_cannot_change_while_pods_exist(kubectl: Kubectl) -> None:
    assert set(CHANGES) == set(FROZEN)
    kubectl.apply(job())
    for field, value in CHANGES.items():
        refused = _patched(kubectl, {field: value})
        assert f"spec.{field}: " in refused, (field, refused)
        assert "cannot change while the job is not suspended; delete the job and apply it again" in refused
    assert "spec.managedBy: " in _patched(kubectl, {"managedBy": "somebody.else/controller"})

    assert _patched(kubectl, {"suspend": True}) == ""
    for field, value in CHANGES.items():
        assert _patched(kubectl, {field: value}) == "", f"a suspended job can be edited: {field}"


def test_frozen_fields_of_succeeded_job_cannot_change(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    """The refusal advised to suspend it, and then the edit was taken and did nothing."""
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    kubelet.learner_ends("job-3v1", 0)
    eventually(lambda: phase(kubectl, "job-3v1") == "Succeeded", why="it is done")
    for field, value in CHANGES.items():
        for spec in ({field: value}, {field: value, "suspend": True}):
            refused = _patched(kubectl, spec)
            assert f"spec.{field}: " in refused, (field, refused)
            assert "the job has succeeded and never runs again; delete the job and apply it again" in refused
            assert "spec.suspend" not in refused
    assert _patched(kubectl, {"ttlSecondsAfterFinished": 0}) == ""
    eventually(lambda: kubectl.get("rmj", "job-3v1") is None, why="its time is over")


def test_job_past_its_deadline_runs_again_with_larger_deadline(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job(activeDeadlineSeconds=1))  # by the clock: it ends by its deadline
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "DeadlineExceeded", why="its time is over")
    kubectl.apply(job(activeDeadlineSeconds=3600))
    kubelet.job_runs("job-3v1")
    assert reason(kubectl, "job-3v1", "Failed") is None


def test_refused_job_is_deleted_after_its_ttl(kubectl: Kubectl, controller: Controller) -> None:
    body = job(learner={"gpus": 1, "template": {"spec": {"hostNetwork": True}}}, ttlSecondsAfterFinished=5)
    kubectl.apply(body)
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "InvalidSpec", why="the controller refuses it")
    eventually(lambda: kubectl.get("rmj", "job-3v1") is None, why="its time is over")


def _patched(kubectl: Kubectl, spec: Object) -> str:
    """What kubectl complains about when it merges this into the spec."""
    done = kubectl.run("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": spec}))
    return done.stderr if done.returncode else ""


def test_job_past_its_deadline_fails_and_releases_pods(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    assert _patched(kubectl, {"activeDeadlineSeconds": 1}) == ""  # by the clock: it ends by its deadline
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "DeadlineExceeded", why="its time is over")
    eventually(lambda: not kubectl.list("deployments"), why="servers are released")
    eventually(lambda: kubelet.pod("job-3v1", "learner") is None, why="the learner was ended")


def test_learner_without_retries_left_gets_no_new_pod(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job(learner={"gpus": 1, "backoffLimit": 2}))
    kubelet.job_runs("job-3v1")
    first = kubelet.pod("job-3v1", "learner") or {}
    kubelet.learner_ends("job-3v1", EXIT_UNAVAILABLE, "out of luck, three times")
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "BackoffLimitExceeded", why="no try is left")
    eventually(lambda: not kubectl.list("deployments"), why="servers are released")
    learners = kubectl.list("pods", selector="stage2.dev/role=learner")
    assert [one["metadata"]["uid"] for one in learners] == [first["metadata"]["uid"]]
    assert "out of luck, three times" in (kubectl.get("rmj", "job-3v1") or {})["status"]["message"]


def test_corrected_failed_job_runs_again(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job(learner={"gpus": 1, "backoffLimit": 0}))
    kubelet.job_runs("job-3v1")
    kubelet.learner_ends("job-3v1", 1, "out of luck")
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "BackoffLimitExceeded", why="no try is left")
    kubectl.apply(job(learner={"gpus": 1, "backoffLimit": 1}))
    eventually(lambda: phase(kubectl, "job-3v1") in ("Pending", "Starting"), why="it begins anew")
    kubelet.job_runs("job-3v1")
    assert reason(kubectl, "job-3v1", "Failed") is None


def test_evicted_learner_is_replaced_without_counting_as_failure(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job(learner={"gpus": 1, "backoffLimit": 0}))
    kubelet.job_runs("job-3v1")
    first = kubelet.pod("job-3v1", "learner") or {}
    name = first["metadata"]["name"]
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    where = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    kubectl("create", "--raw", where, "-f", "-", stdin=eviction)
    eventually(lambda: _another(kubelet, first), why="a new learner")
    kubelet.learner_runs("job-3v1")
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="it runs on")
    kubelet.learner_ends("job-3v1", 0)
    eventually(lambda: phase(kubectl, "job-3v1") == "Succeeded", why="the job succeeds")


def test_explain_names_what_a_job_waits_for(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    kubelet.servers_answer("job-3v1", ready=False)
    eventually(lambda: "Not training because of servers" in _explained(kubectl), why="servers do not answer")
    eventually(lambda: "server-0" in _explained(kubectl), why="it names the server once its pod is seen")
    kubelet.job_runs("job-3v1")
    missing = "Not training because of weights (NotSyncedYet): the learner has not pushed its weights yet"
    eventually(lambda: missing in _explained(kubectl), why="servers answer, and the learner has done nothing yet")
    assert "no optimizer step is done yet" in _explained(kubectl)


def _explained(kubectl: Kubectl) -> str:
    """What `stage2 job explain` prints, asked for as kubectl's plugin."""
    command = ["kubectl", "stage2", "explain", "job-3v1", f"--namespace={kubectl.namespace}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "KUBECONFIG": str(kubectl.kubeconfig), "PATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def _another(kubelet: Kubelet, first: Object) -> bool:
    pod = kubelet.pod("job-3v1", "learner")
    return pod is not None and pod["metadata"]["uid"] != first["metadata"]["uid"]
