"""Events: told once, when something worth a person's attention changed."""

from dataclasses import replace

from stage2_controller.events import events
from stage2_controller.observed import Observed
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
