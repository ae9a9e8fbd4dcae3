"""Pods of a job that is over, or suspended, and that do not end: they keep GPUs, so they are named."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_controller.report import explanation
from stage2_controller.report.explanation import events
from stage2_controller.state import reasons
from stage2_controller.state.ending import OVERDUE_S
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller.job.test_replaced_pods import leaving

GRACE_S = 30.0  # of `leaving`
LATE_S = GRACE_S + OVERDUE_S


def succeeded() -> tuple[b.Object, Observed]:
    raw = b.job()
    seen = replace(b.completed(raw), deployment=None, pods=(leaving(b.rollout_pod(True, True, True)),))
    return raw, seen


def failed() -> tuple[b.Object, Observed]:
    raw = b.job(activeDeadlineSeconds=1)  # by the clock: it is long over
    raw = b.with_status(raw, b.planned(raw, b.started(raw)))
    return raw, b.pods_alone(leaving(b.learner_pod()))


OVER: dict[str, Any] = {"succeeded": succeeded, "failed": failed}


@pytest.mark.parametrize("how", OVER)
def test_overdue_pod_of_finished_job_is_reported(how: str) -> None:
    raw, seen = OVER[how]()
    early = b.planned(raw, seen, after_s=10)
    assert b.condition(early, reasons.PODS_ENDED) is None
    assert early.again_after_s is not None
    assert early.again_after_s <= LATE_S
    raw = b.with_status(raw, early)
    made = b.planned(raw, seen, after_s=LATE_S)
    assert b.condition(made, reasons.PODS_ENDED) == ("False", reasons.PODS_OVERDUE)
    (pod,) = seen.pods
    message = b.message(made, reasons.PODS_ENDED)
    assert f"pod {pod['metadata']['name']} on node {b.NODE} has not ended" in message
    assert f"kubectl describe pod {pod['metadata']['name']} -n team-a" in message
    assert message in made.status["message"], "explain names it"
    told = [event for event in events(raw["status"], made.status) if event.reason == reasons.PODS_OVERDUE]
    assert [event.type for event in told] == ["Warning"]
    step = explanation.first(explanation.chain(b.with_status(raw, made)))
    assert step.name == "outcome"
    ready = b.condition(made, reasons.READY)
    assert ready is not None
    assert (ready[0] == "True") is (how == "succeeded"), "the job itself is done"
    JobStatus.model_validate(made.status)


@pytest.mark.parametrize("how", OVER)
def test_report_of_overdue_pod_clears_once_pod_is_gone(how: str) -> None:
    raw, seen = OVER[how]()
    raw = b.with_status(raw, b.planned(raw, seen, after_s=10))
    raw = b.with_status(raw, b.planned(raw, seen, after_s=LATE_S))
    made = b.planned(raw, replace(seen, pods=()), after_s=LATE_S + 1)
    assert b.condition(made, reasons.PODS_ENDED) is None
    assert "has not ended" not in made.status["message"]


def test_suspended_job_reports_overdue_pod_it_waits_for() -> None:
    raw = b.job(suspend=True)
    seen = b.pods_alone(leaving(b.rollout_pod(True, True, True)))
    early = b.planned(raw, seen, after_s=10)
    assert early.status["message"] == "spec.suspend is true: the pods end"
    assert early.again_after_s is not None
    made = b.planned(b.with_status(raw, early), seen, after_s=LATE_S)
    assert f"pod job-3v1-rollout-x on node {b.NODE} has not ended" in made.status["message"]
    assert "kubectl delete node" not in made.status["message"]


def test_overdue_pod_without_node_is_not_reported() -> None:
    raw, seen = succeeded()
    seen = replace(seen, pods=(leaving(b.pod("rollout", node=None)),))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=LATE_S), reasons.PODS_ENDED) is None
