"""A clock that is set back prolongs no pause beyond its limit: a time that was told and is to come counts as now."""

from dataclasses import replace
from datetime import timedelta

from stage2_controller import conditions, reasons
from stage2_controller.place import binding
from stage2_controller.spec import names
from tests.unit.controller import builders as b

AHEAD_S = 3600.0
"""How wrong the clock was."""


def test_deadlines_count_from_when_the_clock_was_set_back() -> None:
    raw = b.job(activeDeadlineSeconds=60)
    raw = b.told(raw, b.planned(raw, after_s=AHEAD_S))
    observed = b.started(raw)
    back = b.planned(raw, observed)
    assert back.again_after_s is not None
    assert back.again_after_s <= 60
    made = b.planned(b.told(raw, back), observed, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)


def test_the_time_to_start_counts_from_when_the_clock_was_set_back() -> None:
    raw = b.job(learner={"startDeadlineSeconds": 60})
    loading = b.started(raw, pods=(b.rollout_pod(True, False, True), b.waiting_learner_pod()), progress=None)
    raw = b.told(raw, b.planned(raw, loading, after_s=AHEAD_S))
    back = b.planned(raw, loading)
    assert back.again_after_s == 60
    made = b.planned(b.told(raw, back), loading, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_the_time_to_live_counts_from_when_the_clock_was_set_back() -> None:
    raw = b.job(ttlSecondsAfterFinished=100)
    observed = b.started(raw)
    complete = replace(observed, learner=b.learner_job(b.planned(raw, observed), b.job_condition("Complete")))
    raw = b.told(raw, b.planned(raw, complete, after_s=AHEAD_S))
    back = b.planned(raw, complete)
    assert (back.delete_job, back.again_after_s) == (False, 100)
    assert b.planned(b.told(raw, back), complete, after_s=100).delete_job


def test_a_pod_has_its_grace_before_it_is_overdue() -> None:
    """The time of its deletion lies in the future for as long as its grace is: no clock is wrong."""
    pod = b.pod(names.ROLE_LEARNER)
    ends = conditions.timestamp(b.NOW + timedelta(seconds=900))
    pod["metadata"] |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": 900}
    assert binding.seconds_to_overdue(pod, b.NOW) == 900 + binding.OVERDUE_S
    wrong = b.NOW - timedelta(seconds=AHEAD_S)
    assert binding.seconds_to_overdue(pod, wrong) == 900 + binding.OVERDUE_S
