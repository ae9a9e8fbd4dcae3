"""An old learner that has not ended: nothing starts elsewhere meanwhile, or for ever beside one that hangs."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place.binding import OVERDUE_S
from stage2_controller.place.placement import LOOK_AGAIN_S
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import placed, planned


def ending(pod: Any) -> Any:
    made = copy.deepcopy(pod)
    made["metadata"]["deletionTimestamp"] = timestamp(b.NOW)
    return made


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_no_pod_starts_on_another_node_while_an_old_learner_may_still_write(mode: str) -> None:
    raw = b.job(placement={"mode": mode})
    account = n.capacity(n.node(not_ready=True), n.node("z"))
    old = Observed(pods=(ending(b.rollout_pod(True, True, True)), ending(b.learner_pod())))
    made = planned(raw, account, old, after_s=600)
    assert [kind for kind in b.kinds(made) if kind in ("Deployment", "Job")] == []
    assert b.condition(made, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)
    for words in ("pod job-3v1-learner-x", f"node {b.NODE}", f"kubectl delete node {b.NODE}"):
        assert words in made.status["message"]
    assert made.placement
    assert made.placement.again_after_s == LOOK_AGAIN_S
    assert made.placement.keep_for_s == 0, "others may have the room meanwhile"
    fresh = planned(b.told(raw, made), account, Observed(), after_s=601)
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
    assert "Deployment" in b.kinds(beside)
    assert beside.again_after_s == 1
    late = planned(raw, account, there, after_s=OVERDUE_S)
    assert late.deletions == ("Deployment",)
    assert b.condition(late, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)


def test_an_old_learner_that_no_node_took_keeps_nothing_from_starting() -> None:
    old = ending(b.pod(names.ROLE_LEARNER, node=None))
    made = planned(b.job(), n.capacity(n.node()), Observed(pods=(old,)))
    assert "Deployment" in b.kinds(made)
