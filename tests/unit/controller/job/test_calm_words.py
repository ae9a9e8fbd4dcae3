"""What somebody planned is told calmly: a renewal, a drain, a stop of servers are no crashes, and no node is to go."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.plan.result import Plan
from stage2_controller.report.explanation import events
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_replaced_pods import another, leaving
from tests.unit.controller.place.test_placement import placed, planned

SHUTDOWN = "Pod was terminated in response to imminent node shutdown."


def told_to_stop(pod: b.Object, code: int = 143) -> b.Object:
    """A pod that somebody has deleted, whose containers have ended."""
    ended = [{**one, "ready": False, "state": b.ended(code)} for one in pod["status"]["containerStatuses"]]
    gone = leaving(pod)
    return {**gone, "status": {**gone["status"], "containerStatuses": ended}}


def failed(pod: b.Object, **status: Any) -> b.Object:
    """A pod that something else than its containers has ended."""
    ended = [{**one, "ready": False, "state": b.ended(137)} for one in pod["status"]["containerStatuses"]]
    return {**pod, "status": {**pod["status"], "containerStatuses": ended, "phase": "Failed", **status}}


def by(reason: str) -> b.Object:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": f"by {reason}"}]}


STOPPED: dict[str, Any] = {
    "deleted, and still there": leaving,
    "deleted, with exit code 143": told_to_stop,
    "deleted, with exit code 137": lambda pod: told_to_stop(pod, 137),
    "deleted, with exit code 0": lambda pod: told_to_stop(pod, 0),
    "its node shuts down": lambda pod: failed(pod, reason="Terminated", message=SHUTDOWN),
    "its node needs room for itself": lambda pod: failed(pod, reason="Preempting", message="Preempted"),
    "preempted": lambda pod: failed(leaving(pod), **by("PreemptionByScheduler")),
    "its node was tainted": lambda pod: failed(leaving(pod), **by("DeletionByTaintManager")),
    "its node is gone": lambda pod: failed(pod, **by("DeletionByPodGC")),
}
ROLES = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)


def of_role(role: str) -> b.Object:
    return b.rollout_pod(True, True, True) if role == names.ROLE_ROLLOUT else b.learner_pod()


def warnings(before: b.Object, made: Plan) -> list[str]:
    return [event.reason for event in events(before["status"], made.status) if event.type == "Warning"]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", STOPPED)
def test_stopped_pod_is_not_reported_as_crashed(role: str, how: str) -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job())))
    others = [of_role(one) for one in ROLES if one != role]
    made = b.planned(raw, b.started(raw, pods=(*others, STOPPED[how](of_role(role))), progress=None))
    assert warnings(raw, made) == []
    told = str(made.status["conditions"])
    assert reasons.SERVER_CRASHED not in told
    assert reasons.LEARNER_RETRYING not in told
    assert "retries" not in told
    assert "exit code" not in told.replace("the learner ended with exit code 0", "")
    assert "kubectl delete node" not in told


def test_reason_for_pod_terminated_by_node_is_reported() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job())))
    gone = failed(b.rollout_pod(True, True, True), reason="Terminated", message=SHUTDOWN)
    made = b.planned(raw, b.started(raw, pods=(gone, b.learner_pod())))
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.PODS_ENDING)
    assert f"Terminated: {SHUTDOWN}" in b.message(made, reasons.ROLLOUT_READY)


@pytest.mark.parametrize("code", [1, 137])
def test_crashing_server_still_causes_warning(code: int) -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job())))
    down = b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "CrashLoopBackOff", last=b.ended(code)))
    assert warnings(raw, b.planned(raw, b.started(raw, pods=(down, b.learner_pod())))) == [reasons.SERVER_CRASHED]


def test_secret_renewal_causes_no_warning() -> None:
    account = n.capacity(n.node(), n.node("z", 8))
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    stopped = (told_to_stop(b.rollout_pod(True, True, True)), leaving(b.learner_pod()))
    course = [
        replace(seen, secret=None),
        Observed(pods=stopped),
        Observed(pods=stopped[1:]),
        Observed(pods=(told_to_stop(b.learner_pod(), 75),)),
        Observed(),
        replace(seen, pods=(another(b.pod(names.ROLE_ROLLOUT)), another(b.waiting_learner_pod())), progress=None),
    ]
    told = []
    for at_s, observed in enumerate(course):
        made = planned(raw, account, observed, after_s=10.0 * at_s)
        assert warnings(raw, made) == [], at_s
        told.append(str(made.status["conditions"]))
        raw = b.with_status(raw, made)
    assert not any("delete node" in one or "crash" in one.lower() for one in told)


def elsewhere() -> tuple[b.Object, Any, Observed]:
    """A job that is to start on another node, while its old learner ends on the one before."""
    account = n.capacity(n.node("z"), n.node(gpus=1))
    return b.job(), account, Observed(pods=(leaving(b.learner_pod()),), secret=b.secret())


def test_old_learner_ending_in_time_is_waited_for_without_advice_to_delete_node() -> None:
    raw, account, seen = elsewhere()
    made = planned(raw, account, seen)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.OLD_LEARNER_ENDING)
    message = b.message(made, reasons.PLACED)
    assert "kubectl delete node" not in message
    assert "taint" not in message
    assert b.NODE in message
    assert "the job waits for it" in message


def test_old_learner_overdue_is_reported_with_command_to_delete_node() -> None:
    raw, account, seen = elsewhere()
    made = planned(raw, account, seen, after_s=600)
    assert f"kubectl delete node {b.NODE}" in b.message(made, reasons.PLACED)


def test_old_learner_on_not_ready_node_is_reported_with_command_to_delete_node() -> None:
    raw, account, seen = elsewhere()
    account.put("Node", n.node(gpus=1, not_ready=True))
    assert f"kubectl delete node {b.NODE}" in b.message(planned(raw, account, seen), reasons.PLACED)


@pytest.mark.parametrize("role", ROLES)
def test_drain_is_reported_as_soon_as_first_pod_is_told_to_stop(role: str) -> None:
    """It was named half a minute later, when the next pods were refused."""
    account = n.capacity(n.node(), n.node("z"))
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    account.put("Node", n.node(unschedulable=True))
    cordoned = planned(raw, account, seen)
    assert (cordoned.deletions, b.condition(cordoned, reasons.PLACED)) == ((), ("True", reasons.NODE_CHOSEN))
    others = [of_role(one) for one in ROLES if one != role]
    made = planned(raw, account, replace(seen, pods=(*others, leaving(of_role(role)))), after_s=1)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NODE_DRAINED)
    assert made.deletions == ("Job", "Deployment")
    assert "delete node" not in made.status["message"]


def test_missing_or_pending_pod_on_drained_node_moves_job_at_once() -> None:
    account = n.capacity(n.node(), n.node("z"))
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    account.put("Node", n.node(unschedulable=True))
    pending = another(b.pod(names.ROLE_ROLLOUT, node=None))
    for pods in ((b.learner_pod(),), (pending, b.learner_pod())):
        made = planned(raw, account, replace(seen, pods=pods), after_s=1)
        assert b.condition(made, reasons.PLACED) == ("False", reasons.NODE_DRAINED)


def test_terminating_learner_counts_as_running_until_it_exits() -> None:
    raw = b.with_status(b.job(), b.planned(b.job(), b.started(b.job())))
    made = b.planned(raw, b.started(raw, pods=(b.rollout_pod(True, True, True), leaving(b.learner_pod()))))
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("True", reasons.LEARNER_STARTED)
    assert made.status["phase"] == reasons.RUNNING


def test_time_to_end_old_pods_does_not_count_against_new_pods() -> None:
    """A learner may take two minutes to end; its successor's time counts from then."""
    account = n.capacity(n.node())
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    servers = b.rollout_pod(True, True, True)
    course = [(1, leaving(b.learner_pod())), (117, told_to_stop(b.learner_pod(), 75)), (118, None), (119, None)]
    for at_s, learner in course:
        pods = (servers, learner) if learner else (servers,)
        made = planned(raw, account, replace(seen, pods=pods, progress=None), after_s=at_s)
        assert b.condition(made, reasons.PLACED) == ("True", reasons.NODE_CHOSEN), at_s
        raw = b.with_status(raw, made)
