"""Quota that Kueue has reserved: of the same pods until it goes back, and never for those of another spec."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import ADMITTED, condition, queued, workload
from tests.unit.controller.job.test_old_learner import ending
from tests.unit.controller.job.test_placement import planned

UPGRADED = replace(b.SETTINGS, image="stage2/trainer:next")  # the default image of the next release


def without_image(**spec: Any) -> Any:
    raw = queued(**spec)
    del raw["spec"]["image"]
    return raw


def written_after_an_upgrade(raw: Any, account: Any, observed: Observed, after_s: float = 0) -> Any:
    """The Workload that is written."""
    now, view = b.NOW + timedelta(seconds=after_s), account.snapshot(n.KEY)
    made = b.plan(raw, observed, settings=UPGRADED, now=now, nodes=view)
    (found,) = [
        one.manifest for one in comparison.writes(made.children, observed) if one.manifest["kind"] == "Workload"
    ]
    return found


def test_a_job_that_is_suspended_after_an_upgrade_gives_its_quota_back() -> None:
    """Kueue refuses other pod sets while quota is reserved (ValidateWorkloadUpdate), and so the whole write."""
    found = workload(*ADMITTED, host=b.NODE, raw=without_image())
    made = written_after_an_upgrade(without_image(suspend=True), n.capacity(n.node()), Observed(workload=found))
    assert made["spec"]["active"] is False
    assert made["spec"]["podSets"] == found["spec"]["podSets"]


def test_a_job_whose_host_is_gone_gives_its_quota_back_after_an_upgrade() -> None:
    found = workload(*ADMITTED, host="assigned", raw=without_image())
    account = n.capacity(n.node("assigned", unschedulable=True), n.node("free", 8))
    made = written_after_an_upgrade(without_image(), account, Observed(workload=found), after_s=61)
    assert made["spec"]["active"] is False
    assert made["spec"]["podSets"] == found["spec"]["podSets"]


def test_one_that_has_no_quota_asks_for_the_pods_of_the_next_release() -> None:
    found = workload(condition("QuotaReserved", "False"), raw=without_image())
    inactive = {**found, "spec": {**found["spec"], "active": False}}
    marked = {**inactive["metadata"]["annotations"], "stage2.dev/deactivated": "true"}
    inactive["metadata"] = {**inactive["metadata"], "annotations": marked}
    made = written_after_an_upgrade(without_image(), n.capacity(n.node()), Observed(workload=inactive))
    assert "stage2/trainer:next" in str(made["spec"]["podSets"])


def edited(servers: int) -> Any:
    """A job that was suspended, edited and resumed faster than a pass came: its Workload is of three servers."""
    raw = queued(rollout={"servers": servers, "gpusPerServer": 1, "port": 8000})
    raw["metadata"]["generation"] = 4
    return raw


def test_what_was_edited_between_two_passes_does_not_run_on_the_quota_of_before() -> None:
    observed, account = Observed(workload=workload(*ADMITTED, host=b.NODE)), n.capacity(n.node(gpus=16))
    made = planned(edited(7), account, observed)
    assert b.kinds(made) == []
    assert made.deletions == ("Workload",)
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("False", reasons.QUOTA_PENDING)
    assert "of what ran before goes first" in b.message(made, reasons.QUOTA_RESERVED)
    asked = b.child(planned(edited(7), account), "Workload")["spec"]["podSets"][0]
    assert len(asked["template"]["spec"]["containers"]) == 7


def test_its_old_pods_end_before_their_quota_goes() -> None:
    observed = replace(b.started(b.job()), workload=workload(*ADMITTED, host=b.NODE))
    made = planned(edited(7), n.capacity(n.node(gpus=16)), observed)
    assert set(made.deletions) == {"Job", "Deployment"}


def test_what_was_so_edited_while_it_waits_asks_for_what_it_needs_now() -> None:
    found = workload(condition("QuotaReserved", "False", "insufficient quota"))
    made = planned(edited(1), n.capacity(n.node(gpus=16)), Observed(workload=found))
    assert made.deletions == ("Workload",)


def test_a_learner_that_an_older_controller_let_run_beside_it_goes_on() -> None:
    """That one wrote a Workload for its switches alone, and made the pods of the new spec."""
    account, two = n.capacity(n.node(gpus=8)), {"servers": 2, "gpusPerServer": 1, "port": 8000}
    observed = replace(b.started(b.job(rollout=two)), workload=workload(*ADMITTED))
    made = planned(queued(rollout=two), account, observed)
    assert made.deletions == ()
    assert b.condition(made, reasons.QUOTA_RESERVED) == ("True", reasons.ADMITTED)


def test_a_pod_that_has_ended_and_that_others_keep_holds_no_job_up() -> None:
    kept = ending(b.pod("learner", name="kept", phase="Failed"))
    made = planned(edited(2), n.capacity(n.node(gpus=8)), Observed(workload=workload(*ADMITTED), pods=(kept,)))
    assert made.deletions == ("Workload",)


def test_quota_that_is_held_is_not_said_to_be_for_pods_of_an_edit() -> None:
    """Suspension and edit are seen in one pass, and the job is resumed before Kueue has evicted it."""
    found = workload(*ADMITTED)
    observed = replace(b.started(b.job()), workload=found)
    suspended = {**edited(7), "spec": {**edited(7)["spec"], "suspend": True}}
    first = planned(suspended, n.capacity(n.node(gpus=16)), observed)
    written = b.child(first, "Workload")
    assert written["spec"]["podSets"] == found["spec"]["podSets"]
    held = {**written, "metadata": {**written["metadata"], "resourceVersion": "8"}, "status": found["status"]}
    resumed = planned({**edited(7), "status": first.status}, n.capacity(n.node(gpus=16)), Observed(workload=held))
    assert (b.kinds(resumed), resumed.deletions) == ([], ("Workload",))
