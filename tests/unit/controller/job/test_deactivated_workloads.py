"""A Workload that somebody has deactivated stays so; one that the controller did is made active again."""

from typing import Any

import pytest

from stage2_controller.job import diff, explanation, names, reasons
from stage2_controller.job.observed import Observed
from stage2_controller.job.plan import Plan
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import ADMITTED, condition, queued, running, told, workload
from tests.unit.controller.job.test_placement import planned

EVICTED = condition("Evicted", message="The workload is deactivated", reason="Deactivated")
FREED = (condition("QuotaReserved", "False"), condition("Admitted", "False"), EVICTED)


def inactive(*conditions: Any, by_us: bool = False) -> Observed:
    """A Workload that is not active."""
    made = workload(*conditions)
    marks = {names.ANNOTATION_DEACTIVATED: "true"} if by_us else {}
    annotations = {**made["metadata"]["annotations"], **marks}
    metadata = {**made["metadata"], "annotations": annotations}
    return Observed(workload={**made, "metadata": metadata, "spec": {**made["spec"], "active": False}})


def passed(raw: Any, observed: Observed, **more: Any) -> Plan:
    return planned(raw, n.capacity(n.node()), observed, **more)


def written(made: Plan, observed: Observed) -> tuple[bool, bool] | None:
    """Whether the Workload is written active, and marked as deactivated by the controller; None if it is not."""
    found = [write.manifest for write in diff.writes(made.children, observed) if write.manifest["kind"] == "Workload"]
    if not found:
        return None
    return found[0]["spec"]["active"], names.ANNOTATION_DEACTIVATED in found[0]["metadata"]["annotations"]


@pytest.mark.parametrize("conditions", [(), FREED])
def test_a_workload_that_somebody_has_deactivated_stays_so_and_the_job_says_why_it_waits(conditions: Any) -> None:
    raw, observed = queued(), inactive(*conditions)
    made = passed(raw, observed)
    assert written(made, observed) is None
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.WORKLOAD_INACTIVE)
    sentence = b.message(made, reasons.QUOTA_RESERVED)
    assert made.status["message"] == sentence
    assert "somebody has deactivated its Workload job-3v1-quota" in sentence
    assert """kubectl patch workload job-3v1-quota -n team-a --type merge -p '{"spec":{"active":true}}'""" in sentence
    (quota,) = [step for step in explanation.chain(b.told(raw, made)) if step.name == "quota"]
    assert (quota.state, quota.fix) == ("wrong", "spec.active of workload/job-3v1-quota")
    again = passed(b.told(raw, made), observed, after_s=600)
    assert written(again, observed) is None


def test_a_job_that_runs_ends_once_kueue_evicts_it_and_returns_its_quota() -> None:
    observed = running(*ADMITTED, EVICTED)
    held = inactive(*ADMITTED, EVICTED).workload
    made = passed(queued(), Observed(**{**vars(observed), "workload": held}))
    assert made.deletions == ("Job", "Deployment")
    gone = passed(queued(), Observed(workload=held))
    assert told(gone)["QuotaReserved"] == ("False", "Pending")
    assert written(gone, Observed(workload=held)) is None


def test_what_the_controller_deactivated_for_a_suspended_job_is_active_once_that_goes_on() -> None:
    raw, there = queued(suspend=True), Observed(workload=workload())
    made = passed(raw, there)
    assert written(made, there) == (False, True)
    ours = inactive(*FREED, by_us=True)
    assert written(passed(raw, ours), ours) is None
    assert written(passed(queued(), ours), ours) == (True, False)


def test_what_an_older_controller_deactivated_for_a_suspended_job_is_active_once_that_goes_on() -> None:
    raw, unmarked = queued(suspend=True), inactive(*FREED)
    made = passed(raw, unmarked)
    assert written(made, unmarked) == (False, True), "marked while it is suspended"
    resumed = {**queued(), "status": made.status}
    assert written(passed(resumed, unmarked), unmarked) == (True, False), "resumed before it was marked"


def test_a_mark_goes_where_somebody_has_made_the_workload_active() -> None:
    ours = inactive(by_us=True).workload or {}
    there = Observed(workload={**ours, "spec": {**ours["spec"], "active": True}})
    assert written(passed(queued(), there), there) == (True, False)


def test_suspension_and_resumption_make_a_workload_active_that_somebody_had_deactivated() -> None:
    held = inactive(*FREED)
    waits = passed(queued(), held)
    suspended = passed({**queued(suspend=True), "status": waits.status}, held)
    assert written(suspended, held) == (False, True)
    marked = inactive(*FREED, by_us=True)
    assert written(passed({**queued(), "status": suspended.status}, marked), marked) == (True, False)
