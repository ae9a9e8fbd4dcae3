"""What a job that has ended can still do: run again once it is corrected, and go once its time is over."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.plan.result import Plan
from stage2_controller.report import explanation
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b

START = {"startDeadlineSeconds": 60}


def past_deadline(**spec: Any) -> tuple[b.Object, Observed]:
    """A job that was not done in 60 s, and what is left of it."""
    raw = b.job(activeDeadlineSeconds=60, **spec)
    seen = b.started(raw)
    raw = b.with_status(raw, b.planned(raw, seen))
    raw = b.with_status(raw, b.planned(raw, seen, after_s=61))
    assert b.condition(Plan(raw["status"]), reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)
    return raw, Observed(secret=seen.secret)


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        ({"activeDeadlineSeconds": 120}, True),
        ({"activeDeadlineSeconds": None}, True),
        ({"image": "corrected:1"}, True),
        ({}, False),
        ({"activeDeadlineSeconds": 59}, False),
        ({"ttlSecondsAfterFinished": 9000}, False),
        ({"suspend": True}, False),
    ],
)
def test_edited_job_past_its_deadline_runs_again_if_deadline_allows(change: b.Object, runs: bool) -> None:
    """The message asked for a new job, and operator.md said that the corrected file runs."""
    raw, left = past_deadline()
    made = b.planned(b.edited(raw, **change), left, after_s=600)
    assert (made.status["phase"] != reasons.FAILED) is runs
    assert ("Deployment" in b.kinds(made)) is runs
    if runs:
        assert made.status["startTime"] == "2026-01-02T03:14:05Z", "its deadline counts anew"


def test_explain_advises_larger_deadline_for_job_past_its_deadline() -> None:
    raw, _ = past_deadline()
    fix = explanation.first(explanation.chain(raw)).fix
    assert fix == "spec.activeDeadlineSeconds of rmj/job-3v1: it runs again with a larger one, or with none"


@pytest.mark.parametrize("change", [{"suspend": True}, {"activeDeadlineSeconds": 50}, {"evictionLimit": 0}])
def test_succeeded_job_stays_succeeded_after_edit(change: b.Object) -> None:
    raw, seen = b.job(), b.completed(b.job())
    raw = b.with_status(raw, b.planned(raw, seen))
    made = b.planned(b.edited(raw, **change), replace(seen, deployment=None), after_s=600)
    assert (made.status["phase"], made.children) == (reasons.SUCCEEDED, ())


def invalid() -> tuple[b.Object, Observed]:
    return b.job(learner={"gpus": 2}), b.NOTHING


def refused_configuration() -> tuple[b.Object, Observed]:
    raw = b.job()
    learner = b.learner_job(b.planned(raw, b.started(raw)), b.job_condition("Failed", "PodFailurePolicy"))
    return raw, b.started(raw, learner=learner, pods=(b.learner_pod(b.down("learner", 64, "no")),), progress=None)


def exhausted() -> tuple[b.Object, Observed]:
    raw = b.job()
    learner = b.learner_job(b.planned(raw, b.started(raw)), b.job_condition("Failed", "BackoffLimitExceeded"))
    return raw, b.started(raw, learner=learner, pods=(b.learner_pod(b.down("learner", 1, "no")),), progress=None)


def never_started() -> tuple[b.Object, Observed]:
    raw = b.job(learner={"gpus": 1, **START})
    return raw, b.started(raw, pods=(b.rollout_pod(False, False, False), b.waiting_learner_pod()), progress=None)


def out_of_time() -> tuple[b.Object, Observed]:
    raw = b.job(activeDeadlineSeconds=60)
    return raw, b.started(raw)


def succeeded() -> tuple[b.Object, Observed]:
    return b.job(), b.completed(b.job())


ENDS = [invalid, refused_configuration, exhausted, never_started, out_of_time, succeeded]


@pytest.mark.parametrize("reach", ENDS)
def test_ttl_deletes_job_after_every_kind_of_end(reach: Any) -> None:
    raw, seen = reach()
    raw["spec"]["ttlSecondsAfterFinished"] = 100
    raw = b.with_status(raw, b.planned(raw, seen))
    raw = b.with_status(raw, b.planned(raw, seen, after_s=60))
    assert raw["status"]["phase"] in (reasons.FAILED, reasons.SUCCEEDED)
    ended_s = 60 if "not done" in raw["status"]["message"] or "not started" in raw["status"]["message"] else 0
    early = b.planned(raw, seen, after_s=ended_s + 99)
    assert (early.delete_job, early.again_after_s) == (False, 1)
    assert b.planned(raw, seen, after_s=ended_s + 100).delete_job


@pytest.mark.parametrize("ttl", [None, "5", -1, 1.5, True, [], {}])
def test_invalid_ttl_does_not_delete_invalid_job(ttl: Any) -> None:
    raw = b.job(learner={"gpus": 2}, ttlSecondsAfterFinished=ttl)
    raw = b.with_status(raw, b.planned(raw))
    assert not b.planned(raw, after_s=10**6).delete_job


def test_running_job_made_invalid_by_edit_is_not_deleted_by_ttl() -> None:
    raw, seen = b.job(ttlSecondsAfterFinished=0), b.started(b.job())
    raw = b.with_status(raw, b.planned(raw, seen))
    made = b.planned(b.edited(raw, learner={"gpus": 2}), seen, after_s=600)
    assert (made.status["phase"], made.delete_job) == (reasons.RUNNING, False)


def test_invalid_job_managed_by_other_controller_is_not_deleted() -> None:
    raw = b.job(learner={"gpus": 2}, ttlSecondsAfterFinished=0, managedBy="somebody.else/controller")
    assert not b.planned(b.with_status(raw, b.planned(raw)), after_s=600).delete_job
