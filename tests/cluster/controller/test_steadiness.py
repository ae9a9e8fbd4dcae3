"""Nothing happens twice: restarts change nothing, and a steady state makes no request that writes."""

import json
import re
import time

import pytest

from stage2_controller.job import kinds
from tests.cluster.controller.conftest import Controller, Kubectl, Kubelet, eventually, job, phase

pytestmark = [pytest.mark.timeout(300), pytest.mark.in_turns(3, apart=True)]
CHILDREN = [child for child in kinds.CHILDREN if child not in (kinds.WORKLOAD, kinds.JOBSET)]  # of one node, unqueued
KINDS = {one.plural for one in (*CHILDREN, *kinds.watched(kueue=False))}
APPLIED = (kinds.ROLLOUT_MATCHING_JOB, *(child for child in CHILDREN if not child.create_once))


def versions(kubectl: Kubectl) -> dict[tuple[str, str], str]:
    """The resource version of every object that the controller made or watches."""
    return {
        (item["kind"], item["metadata"]["name"]): item["metadata"]["resourceVersion"] for item in kubectl.list(*KINDS)
    }


def settled(kubectl: Kubectl) -> dict[tuple[str, str], str]:
    """The versions once they have stopped changing."""

    def unchanged() -> dict[tuple[str, str], str] | None:
        before = versions(kubectl)
        time.sleep(1.5)  # by the clock: the time between two looks; it looks again
        return before if versions(kubectl) == before else None

    found: dict[tuple[str, str], str] = eventually(unchanged, why="the state settles")
    return found


def applies(kubectl: Kubectl) -> int:
    """Server-side applies that the API server has served, of the kinds that the controller applies."""
    pattern = r'apiserver_request_total\{[^}]*resource="(?:%s)"[^}]*verb="APPLY"[^}]*\} (\S+)'
    resources = "|".join(one.plural for one in APPLIED)
    return sum(int(float(count)) for count in re.findall(pattern % resources, kubectl("get", "--raw", "/metrics")))


def test_controller_restart_changes_nothing(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    def restart(stage: str) -> None:
        for kill in (False, True):
            before = settled(kubectl)
            controller.stop(kill=kill)
            controller.start()
            time.sleep(2)  # by the clock: nothing may happen; a slow machine can only miss the defect
            assert versions(kubectl) == before, f"{stage}; {'killed' if kill else 'asked to end'}"

    kubectl.apply(job())
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the Deployment exists")
    restart("servers load")
    kubelet.servers_answer("job-3v1")
    eventually(lambda: kubelet.pod("job-3v1", "learner"), why="the learner's pod exists")
    restart("the learner starts")
    kubelet.learner_runs("job-3v1")
    eventually(lambda: phase(kubectl, "job-3v1") == "Running", why="the job runs")
    restart("the learner runs")


def test_changes_missed_by_controller_are_caught_up(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    eventually(lambda: kubectl.get("deployment", "job-3v1-rollout"), why="the Deployment exists")
    controller.stop(kill=True)
    kubelet.servers_answer("job-3v1")
    kubectl("delete", "service", "job-3v1-rollout")
    kubectl.apply(job("late"))
    controller.start()
    eventually(lambda: kubectl.get("job", "job-3v1-learner"), why="the learner is created")
    eventually(lambda: kubectl.get("service", "job-3v1-rollout"), why="the Service is back")
    eventually(lambda: kubectl.get("deployment", "late-rollout"), why="the new job is served")


@pytest.mark.alone  # applies are counted for the whole API server
def test_steady_state_causes_no_writes(kubectl: Kubectl, controller: Controller, kubelet: Kubelet) -> None:
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    before, applied = settled(kubectl), applies(kubectl)
    kubectl("annotate", "rmj", "job-3v1", "poke=1")  # a pass that has nothing to do
    # The learner is asked for its progress meanwhile, and does not answer.
    time.sleep(5)  # by the clock: nothing may happen; a slow machine can only miss the defect
    after = versions(kubectl)
    del before["RolloutMatchingJob", "job-3v1"], after["RolloutMatchingJob", "job-3v1"]
    assert after == before
    assert applies(kubectl) == applied


def test_token_survives_controller_restart_and_job_edit(
    kubectl: Kubectl, controller: Controller, kubelet: Kubelet
) -> None:
    kubectl.apply(job())
    secret = eventually(lambda: kubectl.get("secret", "job-3v1-token"), why="the Secret exists")
    kubelet.servers_answer("job-3v1")
    old = eventually(lambda: kubectl.get("job", "job-3v1-learner"), why="the learner exists")["metadata"]["uid"]
    controller.stop(kill=True)
    for spec in ({"suspend": True}, {"image": "another:1"}, {"suspend": False}):
        kubectl("patch", "rmj", "job-3v1", "--type=merge", "-p", json.dumps({"spec": spec}))
    controller.start()

    def image() -> str | None:
        found = kubectl.get("deployment", "job-3v1-rollout")
        return found["spec"]["template"]["spec"]["containers"][0]["image"] if found else None

    eventually(lambda: image() == "another:1", why="the servers start anew with what was edited meanwhile")
    eventually(
        lambda: (kubectl.get("job", "job-3v1-learner") or {}).get("metadata", {}).get("uid", old) != old,
        why="a new one",
    )
    assert (kubectl.get("secret", "job-3v1-token") or {})["data"] == secret["data"]
