"""Servers and learner that have come to two nodes: the whole job moves, and no room is kept for what runs elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.job import reasons
from stage2_controller.job.observed import Observed
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
    made = planned(raw, n.capacity(*ACCOUNT), replace(children, pods=(on(SERVERS, "y"), on(LEARNER, "x"))))
    assert made.deletions == ("Job", "Deployment")
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    told = "the rollout pod on y and the learner pod on x: the whole job moves to one node"
    assert b.message(made, reasons.PLACED) == told
    assert made.placement is not None
    assert made.placement.node is None


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
    made = planned(raw, n.capacity(*ACCOUNT), replace(children, pods=pods))
    assert made.deletions == ()
