"""Room on a node is kept for pods that are made, and not for ever for those that nobody makes."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place.half_placed import NOT_JUDGED_S
from stage2_controller.place.placement import PROMISED_S
from stage2_controller.plan import Plan
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import placed, planned

COLOCATE = b.job(config=b.COLOCATE, rollout={"servers": 0}, learner={"gpus": 4})


def claim(made: Plan) -> str:
    return made.placement.claim if made.placement else pytest.fail("no place")


def waiting(raw: b.Object) -> tuple[Plan, Observed]:
    """The plan of a job, and what is observed of it while its children stand and no pod does."""
    made = planned(raw, n.capacity(n.node()))
    children = {child["kind"]: child for child in made.children}
    return made, Observed(deployment=children.get("Deployment"), learner=children["Job"])


def unbound(role: str, made_s: float, **status: Any) -> b.Object:
    """A pod that was made then and has no node."""
    pod = b.pod(role, node=None, **status)
    pod["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=made_s))
    return pod


@pytest.mark.parametrize(
    ("raw", "patience_s"), [(COLOCATE, PROMISED_S), (b.job(), NOT_JUDGED_S)], ids=["colocate", "servers"]
)
def test_room_for_pods_that_nobody_makes_lapses_and_comes_back_with_them(raw: b.Object, patience_s: float) -> None:
    """Of a learner's pod that is refused its Job says nothing; of the servers' the Deployment does."""
    account = n.capacity(n.node())
    made, observed = waiting(raw)
    raw = b.told(raw, made)
    early = planned(raw, account, observed, after_s=patience_s - 1)
    assert (claim(early), early.again_after_s) == ("promised", 1)
    late = planned(raw, account, observed, after_s=patience_s)
    assert (claim(late), late.deletions) == ("lapsed", ())
    assert b.condition(late, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert "no longer kept" in b.message(late, reasons.PLACED)
    roles = [names.ROLE_LEARNER] + ([names.ROLE_ROLLOUT] if observed.deployment else [])
    pods = tuple(unbound(role, patience_s) for role in roles)
    again = planned(b.told(raw, late), account, replace(observed, pods=pods), after_s=patience_s + 1)
    assert claim(again) == "promised"


def test_room_lapses_after_a_minute_where_the_api_server_refuses_one_of_the_two() -> None:
    account, raw = n.capacity(n.node()), b.job()
    made, observed = waiting(raw)
    refused = {"type": reasons.CHILDREN_APPLIED, "status": "False", "reason": reasons.CHILD_REFUSED, "message": "no"}
    told = b.told(raw, made)
    told["status"]["conditions"].append({**refused, "lastTransitionTime": timestamp(b.NOW)})
    assert claim(planned(told, account, replace(observed, deployment=None), after_s=PROMISED_S)) == "lapsed"


def test_a_job_without_children_asks_for_its_room_anew_after_a_minute() -> None:
    account, raw = n.capacity(n.node()), b.job()
    made, _ = waiting(raw)
    raw = b.told(raw, made)
    assert claim(planned(raw, account, after_s=PROMISED_S - 1)) == "promised"
    assert claim(planned(raw, account, after_s=PROMISED_S)) == "tries"


def test_room_of_pods_that_ran_until_a_moment_ago_is_kept() -> None:
    account, raw, gone_s = n.capacity(n.node()), b.job(), 1200.0
    there = placed(raw, account)
    raw = b.told(raw, planned(raw, account, there))
    drained = replace(there, pods=(), progress=None)
    first = planned(raw, account, drained, after_s=gone_s)
    raw = b.told(raw, first)
    assert claim(planned(raw, account, drained, after_s=gone_s + PROMISED_S)) == "promised"
    assert claim(planned(raw, account, drained, after_s=gone_s + NOT_JUDGED_S)) == "lapsed"


def test_children_that_are_made_late_have_their_room_from_then() -> None:
    account, raw = n.capacity(n.node()), b.job()
    made, observed = waiting(raw)
    at = timestamp(b.NOW + timedelta(seconds=1200))
    learner = {**(observed.learner or {})}
    learner["metadata"] = {**learner["metadata"], "creationTimestamp": at}
    late = replace(observed, learner=learner)
    assert claim(planned(b.told(raw, made), account, late, after_s=1201)) == "promised"


GATED = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "lastTransitionTime": timestamp(b.NOW)}


@pytest.mark.parametrize("told", [[], [GATED]], ids=["no such scheduler", "a gate of others"])
def test_room_for_pods_that_no_scheduler_looks_at_lapses(told: list[Any]) -> None:
    account, raw = n.capacity(n.node()), b.job()
    made, observed = waiting(raw)
    raw = b.told(raw, made)
    pods = tuple(unbound(role, 2, conditions=told) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    observed = replace(observed, pods=pods)
    early = planned(raw, account, observed, after_s=NOT_JUDGED_S + 1)
    assert (claim(early), early.again_after_s) == ("promised", 1)
    late = planned(raw, account, observed, after_s=NOT_JUDGED_S + 2)
    assert (claim(late), late.deletions) == ("lapsed", ())
    assert b.condition(late, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert "its room is no longer kept: no scheduler has spoken of its pods" in b.message(late, reasons.PLACED)
