"""A learner that ended with exit code 0 has trained: nothing that happens beside it, or after it, undoes that."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_evictions import evicted, observed_jobset
from tests.unit.controller.job.test_jobset import SHARDED
from tests.unit.controller.job.test_jobset import job as jobset_job
from tests.unit.controller.job.test_replaced_pods import another, leaving
from tests.unit.controller.job.test_upgrades import OTHER_HASH
from tests.unit.controller.place.test_placement import placed, planned

Found = tuple[b.Object, Observed]
DONE = b.down("learner", 0, b.termination(phase="done", step=10))
LIMITS = {"evictionLimit": 0, "activeDeadlineSeconds": 60}
LATE_S = 61.0


def plain() -> Found:
    raw = b.job(**LIMITS)
    return raw, b.started(raw)


def of_jobset() -> Found:
    raw = jobset_job(**LIMITS)
    return raw, observed_jobset(raw)


def colocated() -> Found:
    raw = b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4}, **LIMITS)
    return raw, Observed(learner=b.learner_job(b.planned(raw)), secret=b.secret(), pods=(b.learner_pod(),))


KINDS: dict[str, Callable[[], Found]] = {"plain": plain, "JobSet": of_jobset, "colocate": colocated}


def done(seen: Observed, container: b.Object = DONE) -> Observed:
    """What is observed once the learner's container has ended, and before its Job has counted it."""
    others = tuple(pod for pod in seen.pods if pod["metadata"]["labels"][names.LABEL_ROLE] != names.ROLE_LEARNER)
    return replace(seen, pods=(*others, {**b.learner_pod(container)}), progress=None)


def with_eviction(seen: Observed) -> Observed:
    """A server is evicted; where there is none, a learner before this one was."""
    gone = evicted(another(b.rollout_pod(True, True, True), 7) if len(seen.pods) > 1 else another(b.learner_pod(), 7))
    gone["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
    return replace(seen, pods=(*seen.pods, gone))


BESIDE: dict[str, tuple[Callable[[Observed], Observed], float]] = {
    "nothing": (lambda seen: seen, 1),
    "an eviction": (with_eviction, 1),
    "the deadline": (lambda seen: seen, LATE_S),
    "its Secret is gone": (lambda seen: replace(seen, secret=None), 1),
    "no certificates": (lambda seen: replace(seen, secret={**b.secret(), "data": {"ca.crt": "eA=="}}), 1),
    "no servers": (lambda seen: replace(seen, pods=seen.pods[-1:], deployment=None), 1),
    "all of it": (lambda seen: replace(with_eviction(seen), secret=None), LATE_S),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beside", BESIDE)
def test_finished_training_stays_successful_whatever_happens_in_same_pass(kind: str, beside: str) -> None:
    """It was thrown away, and failed or began again."""
    raw, seen = KINDS[kind]()
    raw = b.with_status(raw, b.planned(raw, seen))
    happens, after_s = BESIDE[beside]
    made = b.planned(raw, happens(done(seen)), after_s=after_s)
    assert (made.status["phase"], made.children) == (reasons.SUCCEEDED, ())
    assert b.condition(made, reasons.SUCCEEDED) == ("True", reasons.LEARNER_SUCCEEDED)
    assert not {"Job", names.JOBSET} & set(made.deletions), "its log stays"
    assert made.status["progress"] == "10/10"
    assert b.planned(b.with_status(raw, made), Observed(), after_s=after_s).status["phase"] == reasons.SUCCEEDED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beside", ["an eviction", "the deadline"])
def test_eviction_or_deadline_still_fails_job_whose_learner_runs(kind: str, beside: str) -> None:
    raw, seen = KINDS[kind]()
    raw = b.with_status(raw, b.planned(raw, seen))
    happens, after_s = BESIDE[beside]
    made = b.planned(raw, happens(done(seen, b.up("learner"))), after_s=after_s)
    assert made.status["phase"] == reasons.FAILED


def test_finished_training_deletes_servers_at_once() -> None:
    raw, seen = plain()
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.planned(raw, done(seen)).deletions == ("Deployment",)


def test_finished_training_does_not_leave_lost_node() -> None:
    account = n.capacity(n.node())
    raw = b.job()
    seen = placed(raw, account)
    raw = b.with_status(raw, planned(raw, account, seen))
    made = planned(raw, n.capacity(), done(seen))
    assert (made.status["phase"], made.deletions) == (reasons.SUCCEEDED, ("Deployment",))


@pytest.mark.parametrize("code", [1, 64, 75, 137])
def test_nonzero_learner_exit_code_is_not_success(code: int) -> None:
    raw, seen = plain()
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.planned(raw, done(seen, b.down("learner", code))).status["phase"] != reasons.SUCCEEDED


def of_another_spec(pod: b.Object) -> b.Object:
    return {**pod, "metadata": {**pod["metadata"], "annotations": {names.ANNOTATION_SPEC_HASH: OTHER_HASH}}}


@pytest.mark.parametrize("change", [of_another_spec, leaving])
def test_outdated_or_terminating_learner_pod_does_not_decide_success(change: Any) -> None:
    raw, seen = plain()
    raw = b.with_status(raw, b.planned(raw, seen))
    servers, learner = done(seen).pods
    made = b.planned(raw, replace(seen, pods=(servers, change(learner)), progress=None))
    assert made.status["phase"] != reasons.SUCCEEDED


def test_multi_node_training_succeeds_only_when_all_learners_exit_zero() -> None:
    config = b.job(config=SHARDED)["spec"]["config"]
    raw = jobset_job(config=config, learner={"gpus": 1, "nodes": 2})
    seen = observed_jobset(raw)
    raw = b.with_status(raw, b.planned(raw, seen))

    def learners(*containers: b.Object) -> Observed:
        pods = [another(b.learner_pod(one), number) for number, one in enumerate(containers)]
        for number, pod in enumerate(pods):
            pod["metadata"] |= {"labels": {**pod["metadata"]["labels"], names.LABEL_POD_INDEX: str(number)}}
        return replace(seen, pods=(*seen.pods[:2], *pods))

    lacking: list[tuple[tuple[b.Object, ...], str]] = [
        ((DONE, b.up("learner")), reasons.LEARNER_STARTED),
        ((b.up("learner"), DONE), reasons.LEARNER_STARTED),
        ((DONE, b.down("learner", 1)), reasons.LEARNER_RETRYING),
        ((DONE,), reasons.NOT_CREATED),
    ]
    for containers, reason in lacking:
        made = b.planned(raw, learners(*containers))
        assert (made.status["phase"] == reasons.SUCCEEDED, made.deletions) == (False, ()), containers
        assert b.condition(made, reasons.LEARNER_RUNNING) == (str(reason == reasons.LEARNER_STARTED), reason)
    assert b.planned(raw, learners(DONE, DONE)).status["phase"] == reasons.SUCCEEDED


def test_completed_jobset_without_pods_succeeds() -> None:
    raw, seen = of_jobset()
    raw = b.with_status(raw, b.planned(raw, seen))
    completed = {**(seen.jobset or {}), "status": {"conditions": [b.job_condition("Completed")]}}
    assert b.planned(raw, replace(seen, jobset=completed, pods=())).status["phase"] == reasons.SUCCEEDED
