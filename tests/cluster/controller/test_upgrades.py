"""Running jobs on a real API server while policy, versions and Secrets change around them."""

import json
import os
from typing import Any

import pytest

from stage2_controller.job import names
from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, eventually, job, phase, reason

CHANGED = "of-another-version"


def uids(kubectl: Kubectl) -> set[str]:
    """The uids of the pods of all jobs."""
    return {one["metadata"]["uid"] for one in kubectl.list("pods", selector=names.LABEL_JOB)}


def spec(kubectl: Kubectl, **fields: Any) -> None:
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": fields}))


def restart(controller: Controller) -> None:
    controller.stop()
    controller.start()


def test_controller_with_other_defaults_does_not_restart_running_pods(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    """Its hash of the same spec is another one."""
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    before = uids(kubectl)
    controller.stop()
    marked = json.dumps({"metadata": {"annotations": {names.ANNOTATION_SPEC_HASH: CHANGED}}})
    for child in ("deployment/job-3v1-rollout", "job/job-3v1-learner"):
        kubectl("patch", child, "--type=merge", "-p", marked)
    status = json.dumps({"status": {"specHash": CHANGED, "currentHash": None}})
    kubectl("patch", "rmj", "job-3v1", "--subresource=status", "--type=merge", "-p", status)
    controller.start()
    spec(kubectl, activeDeadlineSeconds=86_400)

    def current() -> Any:
        found = kubectl.get("rmj", "job-3v1") or {}
        return found["status"].get("observedGeneration") == found["metadata"]["generation"] and found["status"]

    status_now = eventually(current, why="the edit is seen")
    assert (status_now["phase"], uids(kubectl)) == ("Running", before)


def test_running_job_refused_by_narrowed_policy_is_still_managed(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.apply(job(image="my/trainer:1"))
    kubelet.job_runs("job-3v1")
    before = uids(kubectl)
    monkeypatch.setitem(os.environ, "STAGE2_POLICY", '{"imageRegistries": ["another/"]}')
    restart(controller)
    eventually(lambda: reason(kubectl, "job-3v1", "Accepted") == "NoLongerValid", why="it says which rule it breaks")
    assert (phase(kubectl, "job-3v1"), uids(kubectl)) == ("Running", before)
    spec(kubectl, suspend=True)
    eventually(lambda: not kubectl.list("deployments", "jobs"), why="it can be suspended")
    spec(kubectl, suspend=False)
    eventually(lambda: reason(kubectl, "job-3v1", "Failed") == "InvalidSpec", why="a new start is refused")
    assert not kubectl.list("deployments", "jobs")


def test_deleted_secret_is_recreated_after_its_pods_have_ended(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    before, old = uids(kubectl), (kubectl.get("secret", "job-3v1-token") or {})["metadata"]["uid"]
    controller.stop()
    kubectl("delete", "secret", "job-3v1-token")
    controller.start()
    eventually(lambda: reason(kubectl, "job-3v1", "LearnerRunning") == "SecretRenewed", why="it says so")
    assert kubectl.get("secret", "job-3v1-token") is None or not uids(kubectl) & before
    eventually(lambda: not uids(kubectl) & before and uids(kubectl), why="the job starts again")
    found = eventually(lambda: kubectl.get("secret", "job-3v1-token"), why="with another Secret")
    assert found["metadata"]["uid"] != old
