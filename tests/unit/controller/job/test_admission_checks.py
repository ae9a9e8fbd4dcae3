"""Admission checks of a queue, such as Kueue's ProvisioningRequest: what they say, and what becomes of a job they turn
away."""

from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.observed import Observed
from stage2_controller.plan import Plan
from stage2_controller.report import explanation
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import condition, queued, told, workload
from tests.unit.controller.job.test_placement import planned

Object = dict[str, Any]
RESET = "Reset to Pending after eviction. Previously: Rejected"
REJECTED = "The workload is deactivated due to Admission check(s): capacity, were rejected"
RESERVED = condition("QuotaReserved")
RETRIED = condition("Evicted", message="At least one admission check is false", reason="AdmissionCheck")
TURNED_AWAY = condition("Evicted", message=REJECTED, reason="DeactivatedDueToAdmissionCheck")


def checked(state: str, message: str, *conditions: Object, active: bool = True) -> Observed:
    """What is observed of a job whose Workload has one check in this state."""
    made = workload(*conditions)
    made["status"]["admissionChecks"] = [{"name": "capacity", "state": state, "message": message}]
    made["spec"] = {**made["spec"], "active": active}
    return Observed(workload=made)


def passed(raw: Any, observed: Observed) -> Plan:
    return planned(raw, n.capacity(n.node()), observed)


def test_a_job_says_which_check_it_waits_for_and_what_that_says() -> None:
    made = passed(queued(), checked("Pending", "Provisioning Request ETA: 5 min", RESERVED))
    assert made.status["message"] == "waits in queue team: admission check capacity: Provisioning Request ETA: 5 min"
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
    assert b.kinds(made) == ["Workload"]
    silent = passed(queued(), checked("Pending", "", RESERVED))
    assert silent.status["message"] == "waits in queue team: admission check capacity: Pending"


def test_why_a_check_failed_is_told_until_kueue_asks_it_again() -> None:
    raw = queued()
    failed = passed(raw, checked("Retry", "Retrying after failure: no such machines", RESERVED))
    wanted = "waits in queue team: admission check capacity: Retrying after failure: no such machines"
    assert b.message(failed, reasons.QUOTA_RESERVED) == wanted
    raw = b.told(raw, failed)
    evicted = passed(raw, checked("Pending", RESET, RESERVED, RETRIED))
    assert told(evicted)["QuotaReserved"] == ("False", "Pending")
    assert b.message(evicted, reasons.QUOTA_RESERVED) == wanted
    assert b.condition(evicted, reasons.QUOTA_RESERVED) == ("False", reasons.CHECK_FAILED)
    again = passed(b.told(raw, evicted), checked("Pending", "", RESERVED))
    assert b.condition(again, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)


def test_an_eviction_whose_check_was_never_seen_is_told_in_kueues_words() -> None:
    made = passed(queued(), checked("Pending", RESET, RESERVED, RETRIED))
    assert b.message(made, reasons.QUOTA_RESERVED) == "waits in queue team: At least one admission check is false"


def test_a_job_that_kueue_turned_away_gives_its_quota_back_and_is_not_pushed_into_the_queue_again() -> None:
    raw = queued()
    raw = b.told(raw, passed(raw, checked("Rejected", "no such machines", RESERVED)))
    made = passed(raw, checked("Pending", RESET, RESERVED, TURNED_AWAY, active=False))
    assert b.child(made, "Workload")["spec"]["active"] is False
    assert told(made)["QuotaReserved"] == ("False", "Pending")
    wanted = (
        f"Kueue turned the job away in queue team: {REJECTED}; waits in queue team: admission check capacity: "
        "no such machines"
    )
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_REFUSED)
    assert b.message(made, reasons.QUOTA_RESERVED) == wanted
    raw = b.told(raw, made)
    freed = passed(raw, checked("Pending", RESET, condition("QuotaReserved", "False"), TURNED_AWAY, active=False))
    assert b.child(freed, "Workload")["spec"]["active"] is False
    assert b.message(freed, reasons.QUOTA_RESERVED) == wanted
    (quota,) = [step for step in explanation.chain(b.told(raw, freed)) if step.name == "quota"]
    assert (quota.state, quota.fix) == (
        "wrong",
        "spec.suspend of rmj/job-3v1: true, and false again once what the message names is mended",
    )


def test_what_kueue_is_about_to_deactivate_is_not_made_active_again() -> None:
    target = condition("DeactivationTarget", reason="AdmissionCheck")
    made = passed(queued(), checked("Rejected", "no", RESERVED, target, active=False))
    assert b.child(made, "Workload")["spec"]["active"] is False


@pytest.mark.parametrize("suspended", [True, False])
def test_a_job_that_was_turned_away_asks_anew_once_it_was_suspended(suspended: bool) -> None:
    observed = checked("Pending", RESET, condition("QuotaReserved", "False"), TURNED_AWAY, active=False)
    made = passed(queued(suspend=suspended), observed)
    assert made.deletions == (("Workload",) if suspended else ())
    assert ("Workload" in b.kinds(made)) is not suspended
    gone = passed(queued(suspend=suspended), Observed())
    assert b.child(gone, "Workload")["spec"]["active"] is not suspended


def test_a_person_may_make_the_workload_active_again() -> None:
    observed = checked("Pending", RESET, condition("QuotaReserved", "False"), TURNED_AWAY)
    made = passed(queued(), observed)
    assert b.child(made, "Workload")["spec"]["active"] is True
