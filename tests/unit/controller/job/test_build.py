"""Parsed jobs are held to bounds only where they are new."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_api.validation.size import LARGEST
from stage2_controller import reasons
from stage2_controller.children.build import is_large, parse
from stage2_controller.observed import Observed
from stage2_controller.plan import Plan
from tests.unit.controller import builders as b

NARROW = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, longest_start_seconds=86_400))


def older_than_the_bounds() -> b.Object:
    """A job that waits for longer than the policy allows, and holds more than any new one may."""
    return b.job(
        learner={"gpus": 1, "startDeadlineSeconds": 172_800}, config={"deepspeed": {"note": "x" * 2 * LARGEST}}
    )


def judged(status: str) -> b.Object:
    """The condition by which a controller reported what it makes of the first generation of a spec."""
    return {"type": reasons.ACCEPTED, "status": status, "reason": reasons.VALID, "observedGeneration": 1}


def hash_before(raw: b.Object) -> str:
    """The hash by which a controller without bounds accepted a job."""
    status = {"specHash": "?", "observedGeneration": raw["metadata"]["generation"]}
    return parse({**raw, "status": status}, b.SETTINGS).spec_hash


def planned(raw: b.Object, observed: Observed = b.NOTHING) -> Plan:
    """The plan of a pass under the narrow policy."""
    return b.plan(raw, observed, settings=NARROW, now=b.NOW)


def test_a_bound_that_is_younger_than_a_job_leaves_it_what_it_was_accepted_with() -> None:
    """Else nobody ended it: neither its deadlines nor its learner's end would be looked at."""
    raw = older_than_the_bounds()
    with pytest.raises(ConfigError):
        parse(raw, NARROW)
    status = {"specHash": "of an earlier release", "observedGeneration": 1, "conditions": [judged("True")]}
    assert parse({**raw, "status": status}, NARROW).job.spec.learner.start_deadline_seconds == 172_800


def test_it_keeps_that_also_where_it_is_suspended_or_given_a_deadline() -> None:
    raw = older_than_the_bounds()
    status = {"specHash": hash_before(raw), "observedGeneration": 1, "conditions": [judged("True")]}
    ended = b.edited({**raw, "status": status}, suspend=True, activeDeadlineSeconds=60)
    assert parse(ended, NARROW).job.spec.suspend


@pytest.mark.parametrize(
    "asked",
    [
        {"learner": {"gpus": 1, "startDeadlineSeconds": 2**31 - 1}},
        {"rollout": {"servers": 3, "template": {"metadata": {"annotations": {"note": "x" * 2 * LARGEST}}}}},
    ],
    ids=["how long servers wait", "how much it holds"],
)
def test_a_job_that_was_accepted_is_held_to_the_bounds_in_what_it_asks_for_from_then_on(asked: dict[str, Any]) -> None:
    """Also where nothing looks at an edit before the controller does."""
    raw = b.job(suspend=True)
    raw = b.with_status(raw, planned(raw))
    assert b.condition(planned(raw), reasons.ACCEPTED) == ("True", reasons.VALID)
    resumed = b.edited(b.edited(raw, **asked), suspend=False)
    assert b.condition(planned(resumed), reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)


def test_what_was_refused_of_a_job_that_runs_stays_refused_by_a_controller_that_restarts() -> None:
    raw = b.job()
    raw = b.with_status(raw, planned(raw))
    asked = b.edited(raw, learner={"gpus": 1, "startDeadlineSeconds": 2**31 - 1})
    refused = planned(asked, b.started(asked))
    assert refused.status["specHash"] == raw["status"]["specHash"]
    assert refused.status["observedGeneration"] == asked["metadata"]["generation"]
    with pytest.raises(ConfigError):
        parse(b.with_status(asked, refused), NARROW)


def test_what_stands_beside_a_spec_makes_a_job_large_and_what_others_write_does_not() -> None:
    raw, much = b.job(), {"much": "x" * LARGEST}
    assert is_large({**raw, "junk": much})
    assert not is_large({**raw, "status": much, "metadata": {**raw["metadata"], "annotations": much}})
