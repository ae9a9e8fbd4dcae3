"""Servers and learner that have come to two nodes: the whole job moves, and no room is kept for what runs elsewhere."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place.half_placed import HALF_PLACED_S, SETTLED_S
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_old_learner import ending
from tests.unit.controller.job.test_placement import planned


def on(pod: Any, node: str, **metadata: Any) -> Any:
    return {**pod, "metadata": {**pod["metadata"], **metadata}, "spec": {**pod["spec"], "nodeName": node}}


def untied(mode: str) -> tuple[Any, Observed]:
    """A job that the scheduler was to find a node for: no node was there, or its mode says so."""
    raw = b.job(placement={"mode": mode})
    made = planned(raw, n.capacity())
    children = Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made))
    return b.told(raw, made), children


ACCOUNT = (n.node("x"), n.node("y"))
SERVERS, LEARNER = b.rollout_pod(True, True, True), b.learner_pod()


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_a_job_whose_servers_were_made_anew_on_another_node_leaves_both(mode: str) -> None:
    raw, children = untied(mode)
    observed, account = replace(children, pods=(on(SERVERS, "y"), on(LEARNER, "x"))), n.capacity(*ACCOUNT)
    early = planned(raw, account, observed, after_s=SETTLED_S - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    noted = planned(raw, account, observed, after_s=SETTLED_S)
    assert (noted.deletions, b.condition(noted, reasons.PLACED)) == ((), ("Unknown", reasons.HALF_PLACED))
    made = planned(b.told(raw, noted), account, observed, after_s=SETTLED_S + HALF_PLACED_S)
    assert made.deletions == ("Job", "Deployment")
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    told = "the rollout pod is on y and the learner pod is on x: the whole job moves to one node"
    assert b.message(made, reasons.PLACED) == told
    assert made.placement is not None
    assert (made.placement.node, made.placement.refused) == (None, None), "neither node has refused anything"


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ending(on(SERVERS, "y", name="old")), id="one that is on its way out"),
        pytest.param({**on(SERVERS, "y", name="old"), "status": {"phase": "Failed"}}, id="one that has ended"),
    ],
)
def test_a_pod_that_ends_elsewhere_moves_nothing(mode: str, other: Any) -> None:
    raw, children = untied(mode)
    pods = (other, on(SERVERS, "x", creationTimestamp="2026-01-02T04:00:00Z"), on(LEARNER, "x"))
    made = planned(raw, n.capacity(*ACCOUNT), replace(children, pods=pods), after_s=3600)
    assert made.deletions == ()
    assert b.condition(made, reasons.PLACED) in (None, ("True", reasons.NODE_CHOSEN))


def test_servers_of_the_deployment_before_which_nobody_has_taken_yet_move_nothing() -> None:
    """It was deleted as the job left x: the garbage collector comes to its ReplicaSet, and to its pods after that."""
    raw, account = b.job(), n.capacity(n.node("y"))
    made = planned(raw, account)
    later = {"creationTimestamp": timestamp(b.NOW + timedelta(seconds=20))}
    children = [b.child(made, "Deployment"), b.learner_job(made)]
    deployment, learner_job = ({**one, "metadata": {**one["metadata"], **later}} for one in children)
    pods = (on(SERVERS, "x"), on(b.waiting_learner_pod(), "y", **later))
    observed = Observed(deployment=deployment, learner=learner_job, pods=pods)
    assert planned(b.told(raw, made), account, observed, after_s=200).deletions == ()
