"""A red-team run counts as held only what comes to something where nothing holds it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.red_team.attempt import Attempt, beside_control, lives, survived, table

WHERE = "to connect out, to 10.0.0.9:8000"


def left(who: str, outcome: Any) -> Attempt:
    return Attempt(who, WHERE, outcome)


@pytest.mark.parametrize(
    ("tried", "control", "counts_as"),
    [("held", "GOT", "held"), ("held", "held", "not tried"), ("GOT", "GOT", "GOT"), ("GOT", "held", "GOT")],
)
def test_attack_that_fails_for_control_too_counts_as_not_tried(tried: str, control: str, counts_as: str) -> None:
    (found,) = beside_control([left("twin", tried)], [left("stranger", control)])
    assert (found.who, found.outcome) == ("twin", counts_as)


def pod(uid: str = "u", restarts: int = 0, ready: bool = True) -> dict[str, Any]:
    status = {
        "containerStatuses": [{"restartCount": restarts}],
        "conditions": [{"type": "Ready", "status": str(ready)}],
    }
    return {"metadata": {"uid": uid}, "status": status}


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ([pod()], [pod()], "held"),
        ([pod()], [pod(restarts=1)], "GOT"),
        ([pod()], [pod(uid="another")], "GOT"),
        ([pod()], [pod(ready=False)], "GOT"),
        ([pod()], [], "GOT"),
        ([], [], "not tried"),
        ([pod(ready=False)], [pod(ready=False)], "not tried"),
    ],
    ids=["lives on", "was started again", "was replaced", "is not ready", "is gone", "was not there", "was not ready"],
)
def test_controller_survives_only_if_same_pod_is_ready_without_restart(before: Any, after: Any, outcome: str) -> None:
    assert survived("tenant", "to end it", lives(before), lives(after)).outcome == outcome


def test_table_counts_untried_attacks_separately() -> None:
    detail = table([left("a", "held"), left("b", "not tried"), left("c", "open"), left("d", "GOT")])
    assert detail.splitlines()[0].startswith("GOT")
    assert detail.splitlines()[-1] == "4 attempts: 1 GOT, 1 open, 1 not tried, 1 held"
