"""Pods that hold a job up: an old learner, a learner that the API server refuses, servers that a kubelet turns away."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.place.binding import UNMADE_S
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.placement import LOOK_AGAIN_S
from stage2_controller.state import reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.ending import OVERDUE_S
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import placed, planned

ILL = "Pod was rejected: Allocate failed due to no healthy devices present"


def away(at_s: float, node: str = b.NODE) -> Any:
    """A rollout pod that was made then, and ended before anything of it started."""
    made = b.pod(
        names.ROLE_ROLLOUT,
        node=node,
        name=f"away-{at_s}",
        phase="Failed",
        reason="UnexpectedAdmissionError",
        message=ILL,
    )
    made["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=at_s))
    return made


def waits(mode: str, times: Sequence[float], *newest: Any) -> tuple[Any, Any, Observed]:
    """A job whose learner waits beside servers that were turned away at these times."""
    raw, account = b.job(placement={"mode": mode}), n.capacity(n.node(), n.node("z"))
    observed = placed(raw, account) if mode == "Reserve" else Observed()
    if mode == "Scheduler":
        made = planned(raw, account)
        observed = b.created(made)
    pods = (*map(away, times), *newest, b.pod(names.ROLE_LEARNER))
    return raw, account, replace(observed, pods=pods, progress=None)


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_job_leaves_node_whose_kubelet_rejects_servers_for_a_minute(mode: str) -> None:
    raw, account, observed = waits(mode, range(0, 60, 2))
    early = planned(raw, account, observed, after_s=59)
    assert early.deletions == ()
    late = planned(raw, account, observed, after_s=60)
    assert late.deletions == ("Job", "Deployment")
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)
    assert f"node {b.NODE} reports UnexpectedAdmissionError: {ILL}: the whole job moves" in late.status["message"]
    assert late.placement
    assert late.placement.refused == b.NODE


def test_rejection_by_kubelet_is_reported_for_servers() -> None:
    raw, account, observed = waits("Reserve", [0])
    made = planned(raw, account, observed, after_s=1)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.POD_REFUSED)
    assert f"node {b.NODE} reports UnexpectedAdmissionError: {ILL}" in b.message(made, reasons.ROLLOUT_READY)


@pytest.mark.parametrize("times", [[0, 1, 2], [0, 200], [400, 401]])
def test_brief_rejections_by_kubelet_do_not_move_job(times: list[float]) -> None:
    raw, account, observed = waits("Reserve", times)
    assert planned(raw, account, observed, after_s=410).deletions == ()


def test_rejections_before_server_that_now_loads_are_ignored() -> None:
    loading = b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "ContainerCreating"), name="loads")
    loading["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=70))
    raw, account, observed = waits("Reserve", range(0, 60, 2), loading)
    assert planned(raw, account, observed, after_s=71).deletions == ()


def test_rejections_by_previous_node_are_ignored() -> None:
    """The garbage collector comes to many pods of a deleted Deployment later."""
    raw, account, observed = waits("Reserve", [])
    observed = replace(observed, pods=(*(away(at_s, "before") for at_s in range(0, 60, 2)), *observed.pods))
    assert planned(raw, account, observed, after_s=62).deletions == ()


WORDS = 'Error creating: pods "job-3v1-learner-x" is forbidden: exceeded quota: gpus'


def refused(mode: str = "Reserve", *, servers: str | None = None) -> tuple[Any, Capacity, Observed]:
    """A job, an account of its node, and what is observed while its learner's pod is refused."""
    raw, account = b.job(placement={"mode": mode}), n.capacity(n.node())
    made = planned(raw, account)
    learner = b.learner_job(made)
    learner["metadata"] = {**learner["metadata"], "creationTimestamp": timestamp(b.NOW)}
    status = "True" if servers else "False"
    judged = {"type": "PodScheduled", "status": status, "lastTransitionTime": timestamp(b.NOW)}
    pods = (b.pod(names.ROLE_ROLLOUT, node=servers, conditions=[judged]),)
    return raw, account, Observed(deployment=b.child(made, "Deployment"), learner=learner, pods=pods, secret=b.secret())


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_refused_learner_pod_is_reported_in_api_servers_words(mode: str) -> None:
    raw, account, observed = refused(mode)
    before = planned(raw, account, observed, after_s=UNMADE_S)
    assert b.condition(before, reasons.LEARNER_RUNNING) == ("False", reasons.NOT_CREATED)
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.POD_REFUSED)
    assert b.message(made, reasons.LEARNER_RUNNING) == f"the API server refuses the learner's pod: {WORDS}"


def test_refused_learner_pod_does_not_move_job() -> None:
    raw, account, observed = refused()
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert (b.condition(made, reasons.PLACED), made.deletions) == (("False", reasons.POD_REFUSED), ())
    assert made.status["message"] == WORDS


def test_job_with_running_servers_releases_node_when_learner_pod_is_refused() -> None:
    raw, account, observed = refused(servers=b.NODE)
    raw = b.with_status(raw, planned(raw, account, observed))
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    assert WORDS in b.message(made, reasons.PLACED)
    assert made.deletions == ("Job", "Deployment")


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_events_are_checked_every_minute_while_learner_pod_is_missing(mode: str) -> None:
    raw, account, observed = refused(mode)
    for after_s in (0, UNMADE_S):
        assert planned(raw, account, observed, after_s=after_s).again_after_s <= UNMADE_S


def ending(pod: Any) -> Any:
    made = copy.deepcopy(pod)
    made["metadata"]["deletionTimestamp"] = timestamp(b.NOW)
    return made


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_no_pod_starts_on_another_node_while_old_learner_may_still_write(mode: str) -> None:
    raw = b.job(placement={"mode": mode})
    account = n.capacity(n.node(not_ready=True), n.node("z"))
    old = b.pods_alone(ending(b.rollout_pod(True, True, True)), ending(b.learner_pod()))
    made = planned(raw, account, old, after_s=600)
    assert [kind for kind in b.kinds(made) if kind in ("Deployment", "Job")] == []
    assert b.condition(made, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)
    for words in ("pod job-3v1-learner-x", f"node {b.NODE}", f"kubectl delete node {b.NODE}"):
        assert words in made.status["message"]
    assert made.placement
    assert made.placement.again_after_s == LOOK_AGAIN_S
    assert made.placement.keep_for_s == 0, "others may have the room meanwhile"
    fresh = planned(b.with_status(raw, made), account, Observed(), after_s=601)
    assert {"Deployment", "Job"} <= set(b.kinds(fresh))


def test_servers_on_other_node_than_old_learner_are_deleted() -> None:
    account = n.capacity(n.node("a"), n.node())
    raw, there = b.job(placement={"nodeSelector": {"kubernetes.io/hostname": b.NODE}}), n.capacity(n.node())
    servers = placed(raw, there)
    old = ending(b.learner_pod())
    old["spec"]["nodeName"] = "a"
    made = planned(raw, account, replace(servers, learner=None, pods=(servers.pods[0], old)))
    assert made.deletions == ("Deployment",)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)


def test_servers_run_beside_old_learner_on_same_node_until_it_is_overdue() -> None:
    raw, account = b.job(), n.capacity(n.node(gpus=8))
    there = placed(raw, account)
    there = replace(there, learner=None, pods=(there.pods[0], ending(b.learner_pod())), progress=None)
    beside = planned(raw, account, there, after_s=OVERDUE_S - 1)
    assert ("Deployment" in b.kinds(beside), "Job" in b.kinds(beside)) == (True, False)
    assert b.condition(beside, reasons.LEARNER_RUNNING) == ("False", reasons.OLD_LEARNER_ENDING)
    assert beside.again_after_s == 1
    late = planned(raw, account, there, after_s=OVERDUE_S)
    assert late.deletions == ("Deployment",)
    assert b.condition(late, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)


def test_unscheduled_old_learner_does_not_block_new_pods() -> None:
    """No scheduler binds a pod that is deleted."""
    old = ending(b.pod(names.ROLE_LEARNER, node=None))
    made = planned(b.job(), n.capacity(n.node()), b.pods_alone(old))
    assert {"Deployment", "Job"} <= set(b.kinds(made))
