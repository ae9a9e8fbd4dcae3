"""Workloads over time: deactivated ones, quota that is reserved or goes back, and admission checks."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.children import comparison
from stage2_controller.job import names
from stage2_controller.plan.result import Plan
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import (
    ADMITTED,
    condition,
    passed,
    queued,
    quota_step,
    reported,
    running,
    workload,
)
from tests.unit.controller.place.test_old_learner import ending
from tests.unit.controller.place.test_placement import planned


def test_suspended_job_deletes_workload_after_pods_have_ended() -> None:
    suspended = queued(suspend=True)
    first = passed(suspended, running(*ADMITTED))
    assert (first.deletions, "Workload" in b.kinds(first)) == (("Job", "Deployment"), True)
    observed = running(*ADMITTED, pods=())
    gone = passed(suspended, replace(observed, deployment=None, learner=None))
    assert (gone.deletions, gone.workload_patch, "Workload" in b.kinds(gone)) == (("Workload",), None, False)
    assert "Workload" not in b.kinds(passed(suspended))
    assert b.kinds(passed(queued())) == ["Workload"], "a new one, once it is resumed"


def edited(servers: int) -> Any:
    """A job that was suspended, edited and resumed faster than a pass came: its Workload is of three servers."""
    raw = queued(rollout={"servers": servers, "gpusPerServer": 1, "port": 8000})
    raw["metadata"]["generation"] = 4
    return raw


def test_edited_job_does_not_run_on_quota_of_old_spec() -> None:
    observed, account = Observed(workload=workload(*ADMITTED, host=b.NODE)), n.capacity(n.node(gpus=16))
    made = planned(edited(7), account, observed)
    assert b.kinds(made) == []
    assert made.deletions == ("Workload",)
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
    assert "its earlier Workload is deleted first" in b.message(made, reasons.QUOTA_RESERVED)
    asked = b.child(planned(edited(7), account), "Workload")["spec"]["podSets"][0]
    assert len(asked["template"]["spec"]["containers"]) == 7


def test_edited_job_ends_old_pods_before_releasing_quota() -> None:
    observed = replace(b.started(b.job()), workload=workload(*ADMITTED, host=b.NODE))
    made = planned(edited(7), n.capacity(n.node(gpus=16)), observed)
    assert set(made.deletions) == {"Job", "Deployment"}


def test_edited_pending_job_requests_quota_for_new_spec() -> None:
    found = workload(condition("QuotaReserved", "False", "insufficient quota"))
    made = planned(edited(1), n.capacity(n.node(gpus=16)), Observed(workload=found))
    assert made.deletions == ("Workload",)


def test_learner_started_by_older_controller_with_mismatched_workload_continues() -> None:
    """That one wrote a Workload for its switches alone, and made the pods of the new spec."""
    account, two = n.capacity(n.node(gpus=8)), {"servers": 2, "gpusPerServer": 1, "port": 8000}
    observed = replace(b.started(b.job(rollout=two)), workload=workload(*ADMITTED))
    made = planned(queued(rollout=two), account, observed)
    assert made.deletions == ()
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("True", reasons.ADMITTED)


def test_finished_pod_kept_by_finalizer_does_not_block_new_workload() -> None:
    kept = ending(b.pod("learner", name="kept", phase="Failed"))
    made = planned(edited(2), n.capacity(n.node(gpus=8)), Observed(workload=workload(*ADMITTED), pods=(kept,)))
    assert made.deletions == ("Workload",)


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


def test_pending_admission_check_is_reported_with_its_message() -> None:
    made = passed(queued(), checked("Pending", "Provisioning Request ETA: 5 min", RESERVED))
    assert made.status["message"] == "waits in queue team: admission check capacity: Provisioning Request ETA: 5 min"
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
    assert b.kinds(made) == ["Workload"]
    silent = passed(queued(), checked("Pending", "", RESERVED))
    assert silent.status["message"] == "waits in queue team: admission check capacity: Pending"


def test_failed_admission_check_is_reported_until_kueue_retries_it() -> None:
    raw = queued()
    failed = passed(raw, checked("Retry", "Retrying after failure: no such machines", RESERVED))
    wanted = "waits in queue team: admission check capacity: Retrying after failure: no such machines"
    assert b.message(failed, reasons.QUOTA_RESERVED) == wanted
    raw = b.with_status(raw, failed)
    evicted = passed(raw, checked("Pending", RESET, RESERVED, RETRIED))
    assert reported(evicted)["QuotaReserved"] == ("False", "Pending")
    assert b.message(evicted, reasons.QUOTA_RESERVED) == wanted
    assert b.condition(evicted, reasons.QUOTA_RESERVED) == ("False", reasons.CHECK_FAILED)
    again = passed(b.with_status(raw, evicted), checked("Pending", "", RESERVED))
    assert b.condition(again, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)


def test_eviction_without_known_check_is_reported_in_kueues_words() -> None:
    made = passed(queued(), checked("Pending", RESET, RESERVED, RETRIED))
    assert b.message(made, reasons.QUOTA_RESERVED) == "waits in queue team: At least one admission check is false"


def test_rejected_job_returns_quota_and_is_not_requeued() -> None:
    raw = queued()
    raw = b.with_status(raw, passed(raw, checked("Rejected", "no such machines", RESERVED)))
    made = passed(raw, checked("Pending", RESET, RESERVED, TURNED_AWAY, active=False))
    assert comparison.writes(made.children, checked("", "", active=False)) == []
    assert reported(made)["QuotaReserved"] == ("False", "Pending")
    wanted = (
        f"Kueue turned the job away in queue team: {REJECTED}; waits in queue team: admission check capacity: "
        "no such machines"
    )
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_REFUSED)
    assert b.message(made, reasons.QUOTA_RESERVED) == wanted
    raw = b.with_status(raw, made)
    freed = passed(raw, checked("Pending", RESET, condition("QuotaReserved", "False"), TURNED_AWAY, active=False))
    assert b.message(freed, reasons.QUOTA_RESERVED) == wanted
    quota = quota_step(raw, freed)
    assert (quota.state, quota.fix) == (
        "wrong",
        "spec.suspend of rmj/job-3v1: true, and false again once what the message names is fixed",
    )


@pytest.mark.parametrize("suspended", [True, False])
def test_rejected_job_is_requeued_after_suspension(suspended: bool) -> None:
    observed = checked("Pending", RESET, condition("QuotaReserved", "False"), TURNED_AWAY, active=False)
    made = passed(queued(suspend=suspended), observed)
    assert made.deletions == (("Workload",) if suspended else ())
    assert ("Workload" in b.kinds(made)) is not suspended


EVICTED = condition("Evicted", message="The workload is deactivated", reason="Deactivated")
FREED = (condition("QuotaReserved", "False"), condition("Admitted", "False"), EVICTED)


def inactive(*conditions: Any) -> Observed:
    """A Workload that is not active."""
    made = workload(*conditions)
    return Observed(workload={**made, "spec": {**made["spec"], "active": False}})


def writes(made: Plan, observed: Observed) -> list[str]:
    """The kinds of the children that are written."""
    return [write.manifest["kind"] for write in comparison.writes(made.children, observed)]


@pytest.mark.parametrize("conditions", [(), FREED])
def test_deactivated_workload_stays_inactive_and_is_reported(conditions: Any) -> None:
    raw, observed = queued(), inactive(*conditions)
    made = passed(raw, observed)
    assert writes(made, observed) == []
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.WORKLOAD_INACTIVE)
    sentence = b.message(made, reasons.QUOTA_RESERVED)
    assert made.status["message"] == sentence
    assert "somebody deactivated its Workload job-3v1-quota" in sentence
    assert """kubectl patch workload job-3v1-quota -n team-a --type merge -p '{"spec":{"active":true}}'""" in sentence
    quota = quota_step(raw, made)
    assert (quota.state, quota.fix) == ("wrong", "spec.active of workload/job-3v1-quota")
    again = passed(b.with_status(raw, made), observed, after_s=600)
    assert writes(again, observed) == []


def test_job_continues_while_deactivated_workload_is_still_admitted() -> None:
    held = inactive(*ADMITTED).workload
    made = passed(queued(), Observed(**{**vars(running(*ADMITTED)), "workload": held}))
    assert not made.deletions
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("True", reasons.ADMITTED)


def test_job_with_deactivated_workload_ends_on_eviction_and_returns_quota() -> None:
    observed = running(*ADMITTED, EVICTED)
    held = inactive(*ADMITTED, EVICTED).workload
    made = passed(queued(), Observed(**{**vars(observed), "workload": held}))
    assert made.deletions == ("Job", "Deployment")
    gone = passed(queued(), Observed(workload=held))
    assert reported(gone)["QuotaReserved"] == ("False", "Pending")
    assert writes(gone, Observed(workload=held)) == []


RECOVERS = condition("PodsReady", "False", reason="WaitForRecovery")
WAITS = (condition("QuotaReserved", "False"), condition("Admitted", "False"))


@pytest.mark.parametrize(
    "found",
    [
        pytest.param((*ADMITTED, RECOVERS, condition("Evicted", reason="PodsReadyTimeout")), id="evicted"),
        pytest.param((*WAITS, RECOVERS), id="in the queue"),
    ],
)
def test_evicted_job_reports_pods_not_ready_as_waiting_for_start(found: Any) -> None:
    """Else Kueue counts its recoveryTimeout from before the eviction, and evicts the job as soon as it is admitted."""
    made = planned(queued(), n.capacity(n.node()), Observed(workload=workload(*found)), after_s=600)
    assert reported(made)["PodsReady"] == ("False", "WaitForStart")


def test_admitted_job_refused_by_resource_quota_returns_kueue_quota_after_timeout() -> None:
    """Kueue counts waitForPodsReady.timeout from its admission."""
    admitted = Observed(workload=workload(*ADMITTED), over_quota="needs 4 pods")
    made = passed(queued(), admitted)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.QUOTA_EXCEEDED)
    assert b.kinds(made) == ["Workload"]
    evicted = workload(*ADMITTED, condition("Evicted", reason="PodsReadyTimeout"))
    assert reported(passed(queued(), replace(admitted, workload=evicted)))["QuotaReserved"] == ("False", "Pending")


def test_waiting_for_start_is_not_reported_to_kueue_twice() -> None:
    found = workload(*WAITS, condition("PodsReady", "False", reason="WaitForStart"))
    assert planned(queued(), n.capacity(n.node()), Observed(workload=found)).workload_patch is None


def test_evicted_job_returns_quota_though_finalizer_keeps_finished_pod() -> None:
    kept = ending(b.pod(names.ROLE_LEARNER, b.down("learner", 0), name="kept", phase="Succeeded"))
    found = workload(*ADMITTED, condition("Evicted", message="preempted"))
    made = planned(queued(), n.capacity(n.node()), Observed(workload=found, pods=(kept,)))
    assert reported(made)["QuotaReserved"] == ("False", "Pending")
