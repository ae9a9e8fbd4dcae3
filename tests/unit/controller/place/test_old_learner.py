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
def test_a_job_leaves_a_node_that_has_taken_no_servers_for_a_minute(mode: str) -> None:
    raw, account, observed = waits(mode, range(0, 60, 2))
    early = planned(raw, account, observed, after_s=59)
    assert early.deletions == ()
    late = planned(raw, account, observed, after_s=60)
    assert late.deletions == ("Job", "Deployment")
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)
    assert f"node {b.NODE} reports UnexpectedAdmissionError: {ILL}: the whole job moves" in late.status["message"]
    assert late.placement
    assert late.placement.refused == b.NODE


def test_why_a_node_took_no_servers_is_reported() -> None:
    raw, account, observed = waits("Reserve", [0])
    made = planned(raw, account, observed, after_s=1)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.POD_REFUSED)
    assert f"node {b.NODE} reports UnexpectedAdmissionError: {ILL}" in b.message(made, reasons.ROLLOUT_READY)


@pytest.mark.parametrize("times", [[0, 1, 2], [0, 200], [400, 401]])
def test_a_kubelet_that_turned_servers_away_for_a_moment_keeps_the_job(times: list[float]) -> None:
    raw, account, observed = waits("Reserve", times)
    assert planned(raw, account, observed, after_s=410).deletions == ()


def test_what_was_turned_away_before_servers_that_load_is_past() -> None:
    loading = b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "ContainerCreating"), name="loads")
    loading["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=70))
    raw, account, observed = waits("Reserve", range(0, 60, 2), loading)
    assert planned(raw, account, observed, after_s=71).deletions == ()


def test_what_another_node_turned_away_does_not_count_for_the_next() -> None:
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
def test_its_sentence_is_reported_of_the_learner(mode: str) -> None:
    raw, account, observed = refused(mode)
    before = planned(raw, account, observed, after_s=UNMADE_S)
    assert b.condition(before, reasons.LEARNER_RUNNING) == ("False", reasons.NOT_CREATED)
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.POD_REFUSED)
    assert b.message(made, reasons.LEARNER_RUNNING) == f"the API server refuses the learner's pod: {WORDS}"


def test_another_node_would_not_help_and_nothing_moves() -> None:
    raw, account, observed = refused()
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert (b.condition(made, reasons.PLACED), made.deletions) == (("False", reasons.POD_REFUSED), ())
    assert made.status["message"] == WORDS


def test_half_of_a_job_gives_its_node_back_with_the_reason() -> None:
    raw, account, observed = refused(servers=b.NODE)
    raw = b.with_status(raw, planned(raw, account, observed))
    made = planned(raw, account, replace(observed, learner_refused=WORDS), after_s=UNMADE_S)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    assert WORDS in b.message(made, reasons.PLACED)
    assert made.deletions == ("Job", "Deployment")


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_a_pass_looks_at_events_every_minute_while_a_pod_is_missing(mode: str) -> None:
    raw, account, observed = refused(mode)
    for after_s in (0, UNMADE_S):
        assert planned(raw, account, observed, after_s=after_s).again_after_s <= UNMADE_S


def ending(pod: Any) -> Any:
    made = copy.deepcopy(pod)
    made["metadata"]["deletionTimestamp"] = timestamp(b.NOW)
    return made


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_no_pod_starts_on_another_node_while_an_old_learner_may_still_write(mode: str) -> None:
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


def test_servers_that_stand_on_another_node_than_an_old_learner_are_taken_back() -> None:
    account = n.capacity(n.node("a"), n.node())
    raw, there = b.job(placement={"nodeSelector": {"kubernetes.io/hostname": b.NODE}}), n.capacity(n.node())
    servers = placed(raw, there)
    old = ending(b.learner_pod())
    old["spec"]["nodeName"] = "a"
    made = planned(raw, account, replace(servers, learner=None, pods=(servers.pods[0], old)))
    assert made.deletions == ("Deployment",)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)


def test_servers_start_beside_an_old_learner_of_their_node_until_it_should_have_ended_long_ago() -> None:
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


def test_an_old_learner_that_no_node_took_keeps_nothing_from_starting() -> None:
    """No scheduler binds a pod that is deleted."""
    old = ending(b.pod(names.ROLE_LEARNER, node=None))
    made = planned(b.job(), n.capacity(n.node()), b.pods_alone(old))
    assert {"Deployment", "Job"} <= set(b.kinds(made))
