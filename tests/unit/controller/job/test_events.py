"""Events: told once, when something worth a person's attention changed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stage2_controller import reasons
from stage2_controller.observed import Observed
from stage2_controller.report.explanation import events
from tests.unit.controller import builders as b


def test_nothing_new_is_no_event() -> None:
    raw = b.job()
    status = b.planned(raw, b.started(raw)).status
    assert events(status, status) == []


def test_progress_is_no_event() -> None:
    raw = b.job()
    first = b.planned(raw, b.started(raw)).status
    later = b.planned(raw, b.started(raw, progress=b.report(step=5))).status
    assert first != later
    assert events(first, later) == []


def test_a_new_job_that_waits_as_it_should_is_no_event() -> None:
    assert events({}, b.planned(b.job()).status) == []


def test_a_refused_spec_is_one_warning() -> None:
    (event,) = events({}, b.planned(b.job(learner={"gpus": 2})).status)
    assert (event.type, event.reason) == ("Warning", "InvalidSpec")


SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in Path(str(reasons.__file__)).parents[1].rglob("*.py"))
FAILURES = set(re.findall(r"""(?:Outcome|Condition)\(reasons\.FAILED, (?:"True", )?reasons\.(\w+)""", SOURCES))


def test_the_reasons_of_failures_are_found() -> None:
    assert {"INVALID_SPEC", "CONFIGURATION_ERROR", "START_DEADLINE", "DEADLINE_EXCEEDED"} <= FAILURES


@pytest.mark.parametrize("reason", sorted(FAILURES))
def test_every_failure_is_a_warning(reason: str) -> None:
    told = {"type": reasons.FAILED, "status": "True", "reason": getattr(reasons, reason), "message": "why"}
    (event,) = events({}, {"conditions": [told]})
    assert event.type == "Warning"


def test_the_milestones_of_a_run_are_events() -> None:
    raw = b.job()
    observed = b.started(raw)
    stages = [
        Observed(pods=(b.rollout_pod(True, True, True),)),
        observed,
        replace(observed, learner=b.learner_job(b.planned(raw, observed), b.job_condition("Complete"))),
    ]
    told: list[str] = []
    previous: dict[str, object] = {}
    for stage in stages:
        status = b.planned({**raw, "status": previous}, stage).status
        told += [event.reason for event in events(previous, status)]
        previous = status
    assert told == ["ServersReady", "LearnerStarted", "SameVersion", "LearnerSucceeded"]
