"""A ResourceQuota on a real API server: a job above it has no pods and no node, and starts once there is room."""

import functools
import json

from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, eventually, job, reason
from tests.cluster.controller.test_placement import message

GPUS = "requests.nvidia.com/gpu"


def allow(kubectl: Kubectl, gpus: int) -> None:
    """Set the quota of the namespace, and wait until the API server counts by it."""
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}}
    kubectl.apply({**body, "spec": {"hard": {GPUS: str(gpus)}}})

    def counts() -> bool:
        status = (kubectl.get("quota", "gpus") or {}).get("status", {})
        return bool(status.get("hard", {}).get(GPUS) == str(gpus) and "used" in status)

    eventually(counts, why="the quota counts")


def pods(kubectl: Kubectl, name: str) -> int:
    """How many pods a job has."""
    return len(kubectl.list("pods", selector=f"stage2.dev/job={name}"))


def test_job_over_quota_has_no_pods_and_starts_once_there_is_room(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    allow(kubectl, 3)
    kubectl.apply(job())
    eventually(lambda: reason(kubectl, "job-3v1", "Placed") == "QuotaExceeded", why="the job says what it waits for")
    assert f"needs 4 {GPUS}; ResourceQuota gpus of namespace {kubectl.namespace} allows 3" in message(
        kubectl, "job-3v1"
    )
    assert not kubectl.list("deployments", "jobs", "pods")
    allow(kubectl, 6)
    eventually(lambda: pods(kubectl, "job-3v1") == 2, why="the job starts at once")
    kubelet.job_runs("job-3v1")
    kubectl.apply(job("second"))
    reported = functools.partial(reason, kubectl, "second", "Placed")
    eventually(lambda: reported() == "QuotaExceeded", why="the first holds four of six")
    kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": {"suspend": True}}))
    eventually(lambda: pods(kubectl, "second") == 2, why="the second takes its turn")
    events = [one for one in kubectl.list("events") if one["reason"] == "QuotaExceeded"]
    assert sorted(one["involvedObject"]["name"] for one in events) == ["job-3v1", "second"]
    assert "exceeded quota" not in "".join(one["message"] for one in kubectl.list("events")), "nothing tried in vain"


def test_only_as_many_jobs_start_at_once_as_quota_allows(kubectl: Kubectl, controller: Controller) -> None:
    allow(kubectl, 8)
    names = [f"job-{index}" for index in range(6)]
    kubectl.apply({"apiVersion": "v1", "kind": "List", "items": [job(name) for name in names]})
    eventually(lambda: len(kubectl.list("pods")) == 4, why="two of them start")
    waiting = [name for name in names if not pods(kubectl, name)]
    for name in waiting:
        reported = functools.partial(reason, kubectl, name, "Placed")
        eventually(lambda reported=reported: reported() == "QuotaExceeded", why=f"{name} waits")
    assert (len(waiting), len(kubectl.list("deployments", "jobs"))) == (4, 4)
    assert "exceeded quota" not in "".join(one["message"] for one in kubectl.list("events")), "nothing tried in vain"
