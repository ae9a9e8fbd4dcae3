"""A server counts as ready when it answers and holds the weights that the learner pushed last."""

import copy
from dataclasses import replace
from typing import Any

from stage2_controller import reasons
from stage2_controller.children.pods import GateCondition
from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b


def gated(pod: Any, told: str | None = None) -> Any:
    made = copy.deepcopy(pod)
    made["spec"]["readinessGates"] = [{"conditionType": names.GATE}]
    made["status"]["conditions"] = [{"type": names.GATE, "status": told}] if told else []
    return made


def observed(
    told: str | None = None, *, restarts: int = 0, held: tuple[int, ...] = (4, 4, 4), pushed: int = 4
) -> Observed:
    servers = [b.up("server-0"), b.up("server-1", restarts=restarts), b.up("server-2")]
    pods = (gated(b.pod(names.ROLE_ROLLOUT, *servers), told), b.learner_pod())
    return b.started(b.job(), pods=pods, progress=b.report(held=held, pushed=pushed))


def test_the_pod_is_told_ready_once_all_servers_hold_the_pushed_version() -> None:
    gate = b.planned(b.job(), observed()).gate
    assert gate == GateCondition("job-3v1-rollout-x", "True", "all servers hold version 4")


def test_nothing_is_told_twice() -> None:
    assert b.planned(b.job(), observed("True")).gate is None
    assert b.planned(b.job(), observed(held=(4, 3, 4))).gate is None  # absent means false
    assert b.planned(b.job(), replace(observed(), progress=None)).gate is None


def test_a_server_behind_makes_the_pod_unready() -> None:
    gate = b.planned(b.job(), observed("True", held=(4, 3, 4))).gate
    assert gate
    assert (gate.status, gate.message) == ("False", "waits for version 4: server-1")


def test_a_server_that_started_anew_is_not_ready_until_the_next_push() -> None:
    raw = b.told(b.job(), b.planned(b.job(), observed()))
    first = b.planned(raw, observed("True", restarts=1))
    second = b.planned(b.told(raw, first), observed("False", restarts=1))
    for made in (first, second):
        assert made.status["servers"][1] | {"baseUrl": ""} == {
            "name": "server-1",
            "baseUrl": "",
            "ready": False,
            "restarts": 1,
        }
        assert b.condition(made, reasons.WEIGHTS_IN_SYNC) == ("False", reasons.SERVER_RESTARTED)
    assert first.gate
    assert first.gate.status == "False"
    pushed = b.planned(b.told(raw, second), observed("False", restarts=1, held=(5, 5, 5), pushed=5))
    assert pushed.status["servers"][1]["ready"]
    assert pushed.gate
    assert pushed.gate.status == "True"
    assert b.planned(b.told(raw, pushed), observed("True", restarts=1, held=(5, 5, 5), pushed=5)).gate is None


def test_a_pod_that_knows_no_gate_is_left_alone() -> None:
    assert b.planned(b.job(), b.started(b.job())).gate is None


def test_static_yaml_has_no_gate_that_nobody_would_open() -> None:
    from stage2_api.parsing import parse_job
    from stage2_controller.children.build import static_children

    (deployment,) = [item for item in static_children(parse_job(b.job())) if item["kind"] == "Deployment"]
    assert "readinessGates" not in deployment["spec"]["template"]["spec"]
    assert b.child(b.planned(b.job()), "Deployment")["spec"]["template"]["spec"]["readinessGates"]
