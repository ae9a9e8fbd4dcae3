"""The status of a job that trains on a kubelet while its pods are replaced, in each way that this happens.

It must never speak of pods that are gone: not of the weights that they held, nor of the steps that they did.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_controller.job import names
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from tests.support.clusters import JOB_TIMEOUT_S, ROOT, kubectl
from tests.support.patience import Patience

EXAMPLE = "job-3v1-tiny"
JOB = "replaced"
OWNED = f"--selector={names.LABEL_JOB}={JOB}"
OWNED_JOB = f"--field-selector=metadata.name={JOB}"
BOTH = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)
STEPS = 100_000  # it trains for as long as a test watches
ENOUGH_STEPS = 3
LAG_S = 10.0
"""Seconds that the status may be behind the pods. It was behind by 65 to 170 s."""
FOLDER_MB = 512
OVERFULL = f"""
import os
os.posix_fallocate(os.open("/output/full", os.O_CREAT | os.O_WRONLY), 0, {FOLDER_MB + 100} << 20)
"""
Object = dict[str, Any]


@dataclass
class Watched:
    """A job of one server and one learner, whose status is compared with its pods whenever it is read."""

    kubeconfig: Path
    status: Object = field(default_factory=dict)
    untrue_since: dict[str, float] = field(default_factory=dict)
    was_out_of_sync: bool = False

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return kubectl(self.kubeconfig, *arguments, stdin=stdin)

    def apply(self) -> None:
        """Apply the example with one server, and with an output folder of a bounded size."""
        manifest = yaml.safe_load((ROOT / "examples" / f"{EXAMPLE}.yaml").read_text())
        manifest["metadata"]["name"], spec = JOB, manifest["spec"]
        del spec["activeDeadlineSeconds"]
        spec["rollout"]["servers"] = 1
        spec["learner"]["backoffLimit"] = 20
        spec["volumes"][0]["emptyDir"] = {"sizeLimit": f"{FOLDER_MB}Mi"}
        del spec["config"]["training"]["eval_steps"]
        spec["config"]["training"] |= {"max_steps": STEPS, "save_steps": 2, "eval_strategy": "no"}
        spec["config"]["custom"]["extra"]["rollout_matching"]["post_rollout_pack_scope"] = "step"  # no answer waits
        self.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))

    def pods(self) -> list[Object]:
        found: list[Object] = json.loads(self.kubectl("get", "pods", OWNED, "--output=json"))["items"]
        return found

    def uid(self, role: str) -> str:
        """The uid of the pod of a role that runs; empty if none does."""
        return next((uid for uid, pod in _alive(self.pods()).items() if _role(pod) == role), "")

    def look(self) -> None:
        """Read pods and job, and fail once the status has been untrue for long."""
        pods = self.pods()
        listed = json.loads(self.kubectl("get", "rmj", OWNED_JOB, "--output=json"))["items"]
        job = listed[0] if listed else {"metadata": {}, "spec": {}}
        self.status, now = job.get("status") or {}, time.monotonic()
        found = untrue(job, pods)
        self.untrue_since = {what: self.untrue_since.get(what, now) for what in found}
        late = [what for what, since in self.untrue_since.items() if now - since > LAG_S]
        assert late == [], (self.status, pods)
        self.was_out_of_sync |= _condition(self.status, reasons.WEIGHTS_IN_SYNC)[0] != "True"

    def until(self, what: Callable[[], bool], *, why: str, timeout_s: float = JOB_TIMEOUT_S) -> None:
        """Watch the job until this holds."""
        patience = Patience(timeout_s)
        while not what():
            assert not patience.ended(), (why, self.status)
            self.look()
            time.sleep(0.5)

    def trains(self) -> bool:
        """Whether the status says that the job trains, and its learner has done some steps."""
        trains = _condition(self.status, reasons.TRAINING) == ("True", reasons.TRAINS)
        return trains and int(self.status.get("step") or 0) >= ENOUGH_STEPS

    def pushed(self) -> tuple[str, int]:
        """Which learner has pushed, and how often."""
        return self.status.get("learnerPod", ""), int((self.status.get("sync") or {}).get("pushes") or 0)

    def events(self) -> list[Object]:
        """The events of the job itself."""
        found: list[Object] = json.loads(self.kubectl("get", "events", "--output=json"))["items"]
        return [one for one in found if one["involvedObject"]["name"] == JOB]


def untrue(job: Object, pods: Sequence[Object]) -> list[str]:
    """What the status says and the pods contradict, both read at about the same time."""
    status, alive = job.get("status") or {}, _alive(pods)
    running = {pod["metadata"]["uid"] for pod in pods if pod["status"].get("phase") == "Running"}
    if status.get("phase") in (reasons.SUCCEEDED, reasons.FAILED):
        return []
    found = []
    holding = [one.get("pod") for one in status.get("servers") or [] if "version" in one]
    in_sync = _condition(status, reasons.WEIGHTS_IN_SYNC)[0] == "True"
    if (in_sync or holding) and (not holding or not set(holding) <= alive.keys()):
        found.append("servers hold weights")
    told = explanation.first(explanation.chain(job)) if status else None
    trains = _condition(status, reasons.TRAINING)[0] == "True" or (told is not None and told.reason == reasons.TRAINS)
    if (trains or status.get("step")) and status.get("learnerPod") not in running:
        found.append("the learner has done steps")
    return found


def _alive(pods: Sequence[Object]) -> dict[str, Object]:
    """The pods that run and were not told to stop, by uid."""
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    return {pod["metadata"]["uid"]: pod for pod in running if "deletionTimestamp" not in pod["metadata"]}


def _role(pod: Object) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_ROLE])


def _condition(status: Object, kind: str) -> tuple[str, str]:
    found = conditions.find(status, kind) or {}
    return found.get("status", ""), found.get("reason", "")


@pytest.fixture(scope="module")
def watched(installed: Path) -> Iterator[Watched]:
    """A job that trains."""
    made = Watched(installed)
    made.apply()
    yield made
    made.kubectl("delete", "rmj", JOB, "--ignore-not-found", "--wait")


def delete_pod(role: str) -> Callable[[Watched], None]:
    def replace(job: Watched) -> None:
        job.kubectl("delete", "pods", f"{OWNED},{names.LABEL_ROLE}={role}", "--wait=false")

    return replace


def evict(job: Watched) -> None:
    """Fill the output folder above its limit, for which the kubelet evicts the pod."""
    job.kubectl("exec", f"job/{JOB}-learner", "--container=learner", "--", "python3", "-c", OVERFULL)
    job.until(lambda: job.status.get("evictions") == 1, why="the eviction is counted")
    assert "exceeds" in job.status["lastEviction"]
    assert reasons.EVICTED in {one["reason"] for one in job.events()}


def drain(job: Watched) -> None:
    """Drain the node of the job's pods, and give it back once they are gone."""
    (node,) = {pod["spec"]["nodeName"] for pod in job.pods()}
    options = ("--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector={names.LABEL_JOB}={JOB}")
    job.kubectl("cordon", node)
    try:
        job.kubectl("drain", node, *options, "--timeout=300s")
        job.until(lambda: not _alive(job.pods()), why="the whole job leaves its node")
    finally:
        job.kubectl("uncordon", node)


def delete_secret(job: Watched) -> None:
    job.kubectl("delete", "secrets", OWNED)
    job.until(lambda: not _alive(job.pods()), why="its pods end, since they have the old Secret's content")


def suspend_and_resume(job: Watched) -> None:
    job.kubectl("patch", "rmj", JOB, "--type=merge", "--patch", '{"spec": {"suspend": true}}')
    suspended = ("True", reasons.SUSPENDED_BY_SPEC)
    try:
        job.until(lambda: _condition(job.status, reasons.SUSPENDED) == suspended, why="no pod is left")
        assert job.pods() == []
        assert "start again at step 0" in job.status["message"], "its output folder ended with its pod"
    finally:
        job.kubectl("patch", "rmj", JOB, "--type=merge", "--patch", '{"spec": {"suspend": false}}')


def delete_and_apply(job: Watched) -> None:
    job.kubectl("delete", "rmj", JOB, "--wait")
    job.apply()


# What is done, and the roles whose pods are others afterwards.
WAYS: dict[str, tuple[Callable[[Watched], None], tuple[str, ...]]] = {
    "rollout pod deleted": (delete_pod(names.ROLE_ROLLOUT), (names.ROLE_ROLLOUT,)),
    "learner's pod deleted": (delete_pod(names.ROLE_LEARNER), (names.ROLE_LEARNER,)),
    "evicted": (evict, BOTH),
    "drained": (drain, BOTH),
    "Secret renewed": (delete_secret, BOTH),
    "suspended and resumed": (suspend_and_resume, BOTH),
    "deleted and applied": (delete_and_apply, BOTH),
}


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("way", WAYS)
def test_status_never_describes_replaced_pods(way: str, watched: Watched) -> None:
    replace, replaced = WAYS[way]
    watched.until(watched.trains, why="it trains")
    before = {role: watched.uid(role) for role in BOTH}
    pushed, watched.was_out_of_sync = watched.pushed(), False
    replace(watched)

    def others() -> bool:
        now = {role: watched.uid(role) for role in BOTH}
        return all(now[role] not in ("", before[role]) for role in replaced)

    watched.until(others, why="other pods run")
    watched.until(lambda: watched.trains() and watched.pushed() != pushed, why="it trains again")
    assert watched.was_out_of_sync, "no server held weights between them"
    assert others()
    if names.ROLE_LEARNER in replaced and way != "deleted and applied":
        told = [one for one in watched.events() if one["reason"] == reasons.STEPS_LOST]
        assert told, "the steps were lost with the output folder"


def test_deleted_starting_job_is_gone_within_ten_seconds(watched: Watched) -> None:
    """The container that waits for the servers held its GPUs for 120 s."""
    watched.kubectl("delete", "rmj", JOB, "--wait")
    watched.until(lambda: not watched.pods(), why="no pod is left")
    watched.apply()
    waiting = reasons.WAITING_FOR_SERVERS
    watched.until(lambda: _condition(watched.status, reasons.LEARNER_RUNNING)[1] == waiting, why="the learner waits")
    watched.kubectl("delete", "rmj", JOB, "--wait=false")
    watched.until(lambda: not watched.pods(), why="its pods are gone", timeout_s=10)
    watched.apply()
