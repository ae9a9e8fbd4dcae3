"""A Workload that somebody has deactivated stays so; one that the controller did is made active again."""

from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.observed import Observed
from stage2_controller.plan import Plan
from stage2_controller.report import explanation
from stage2_controller.spec import names
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
    """Whether the Workload is written active, and as one that the controller deactivated; None if it is not written."""
    found = [
        write.manifest for write in comparison.writes(made.children, observed) if write.manifest["kind"] == "Workload"
    ]
    if not found:
        return None
    mark = found[0]["metadata"]["annotations"].get(names.ANNOTATION_DEACTIVATED)
    return found[0]["spec"]["active"], mark == "true"


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


def test_a_job_goes_on_while_its_deactivated_workload_is_still_admitted() -> None:
    held = inactive(*ADMITTED).workload
    made = passed(queued(), Observed(**{**vars(running(*ADMITTED)), "workload": held}))
    assert not made.deletions
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("True", reasons.ADMITTED)


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


def active_with_mark(value: str) -> Observed:
    """A Workload that is active again, with a mark that Kueue has made its own: no apply removes it."""
    ours = inactive(by_us=True).workload or {}
    metadata = {**ours["metadata"], "annotations": {**ours["metadata"]["annotations"]}}
    metadata["annotations"][names.ANNOTATION_DEACTIVATED] = value
    return Observed(workload={**ours, "metadata": metadata, "spec": {**ours["spec"], "active": True}})


def test_a_mark_is_taken_back_once_where_the_workload_is_active() -> None:
    there = active_with_mark("true")
    assert written(passed(queued(), there), there) == (True, False)
    taken_back = active_with_mark("false")
    assert written(passed(queued(), taken_back), taken_back) is None


def test_a_workload_that_somebody_deactivates_later_is_theirs_whatever_the_controller_did_before() -> None:
    there = active_with_mark("false").workload or {}
    held = Observed(workload={**there, "spec": {**there["spec"], "active": False}})
    made = passed(queued(), held)
    assert written(made, held) is None
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.WORKLOAD_INACTIVE)


def test_suspension_and_resumption_make_a_workload_active_that_somebody_had_deactivated() -> None:
    held = inactive(*FREED)
    waits = passed(queued(), held)
    suspended = passed({**queued(suspend=True), "status": waits.status}, held)
    assert written(suspended, held) == (False, True)
    marked = inactive(*FREED, by_us=True)
    assert written(passed({**queued(), "status": suspended.status}, marked), marked) == (True, False)
