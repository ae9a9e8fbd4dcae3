"""A node whose kubelet takes no pod of a job, such as for devices that are ill: each ends before it starts."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import placed, planned

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
        observed = Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made))
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
    assert f"node {b.NODE} says UnexpectedAdmissionError: {ILL}: the whole job moves" in late.status["message"]
    assert late.placement
    assert late.placement.refused == b.NODE


def test_why_a_node_took_no_servers_is_told() -> None:
    raw, account, observed = waits("Reserve", [0])
    made = planned(raw, account, observed, after_s=1)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.POD_REFUSED)
    assert f"node {b.NODE} says UnexpectedAdmissionError: {ILL}" in b.message(made, reasons.ROLLOUT_READY)


@pytest.mark.parametrize("times", [[0, 1, 2], [0, 200], [400, 401]])
def test_a_kubelet_that_turned_servers_away_for_a_moment_keeps_the_job(times: list[float]) -> None:
    raw, account, observed = waits("Reserve", times)
    assert planned(raw, account, observed, after_s=410).deletions == ()


def test_what_was_turned_away_before_servers_that_load_is_past() -> None:
    loading = b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "ContainerCreating"), name="loads")
    loading["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=70))
    raw, account, observed = waits("Reserve", range(0, 60, 2), loading)
    assert planned(raw, account, observed, after_s=71).deletions == ()


def test_what_another_node_turned_away_says_nothing_of_the_next_one() -> None:
    """The garbage collector comes to many pods of a deleted Deployment later."""
    raw, account, observed = waits("Reserve", [])
    observed = replace(observed, pods=(*(away(at_s, "before") for at_s in range(0, 60, 2)), *observed.pods))
    assert planned(raw, account, observed, after_s=62).deletions == ()
