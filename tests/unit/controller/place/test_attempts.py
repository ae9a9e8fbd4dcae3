"""An attempt to place a job ends when its pods do not all get the node; the next one begins after a pause."""

import copy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.place import binding, placement
from stage2_controller.place.binding import ATTEMPT_S, PREEMPTS_S, REFUSED_S
from stage2_controller.place.capacity import FIRST_PAUSE_S, LONGEST_PAUSE_S, PROMISE_S, Capacity
from stage2_controller.plan.result import Plan
from stage2_controller.state import reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.ending import OVERDUE_S
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_old_learner import ending
from tests.unit.controller.place.test_placement import NO_CLAIM, half, planned, refused_pod

MODES = pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
ROLES = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)
WHOLE = (("True", reasons.NODE_CHOSEN), None)  # None: the scheduler has found the node
NO_ROOM = "1 Insufficient nvidia.com/gpu"
HOUR_S = 3600.0


class Life:
    """A job through several passes, with the account of its nodes and a clock."""

    def __init__(self, *objects: Any, mode: str = "Reserve", sees_nodes: bool = True, **spec: Any) -> None:
        self.now = 0.0
        self.account = Capacity(clock=lambda: self.now, sees_nodes=sees_nodes)
        for body in (objects or (n.node(),)) if sees_nodes else ():
            self.account.put("Pod" if "containers" in body["spec"] else "Node", body)
        self.raw = b.job(placement={"mode": mode}, **spec)

    def children(self, *, at_s: float = 0) -> Observed:
        """What stands once the children of the next plan are created."""
        made = self.passes(at_s=at_s)
        return b.created(made)

    def passes(self, observed: Observed = b.NOTHING, *, at_s: float = 0, nodes_may_come: bool = False) -> Plan:
        """Make a pass at this time after NOW, and record what it decides."""
        self.now = at_s
        made = planned(self.raw, self.account, observed, after_s=at_s, nodes_may_come=nodes_may_come)
        placement.record(made.placement, self.account, n.KEY, started_at="")
        self.raw = b.with_status(self.raw, made)
        return made


def bound(role: str, node: str = b.NODE, at_s: float = 0, **metadata: Any) -> Any:
    """A pod that the scheduler has bound."""
    at = {"lastTransitionTime": timestamp(b.NOW + timedelta(seconds=at_s))}
    pod = b.rollout_pod(True, True, True) if role == names.ROLE_ROLLOUT else b.learner_pod()
    status = {**pod["status"], "conditions": [{"type": "PodScheduled", "status": "True", **at}]}
    return {
        **pod,
        "metadata": {**pod["metadata"], **metadata},
        "spec": {**pod["spec"], "nodeName": node},
        "status": status,
    }


def pending(role: str, made_s: float = 0, **parts: Any) -> Any:
    """A pod that was created then and of which the scheduler has reported nothing."""
    pod = b.pod(role, node=None)
    pod["metadata"]["creationTimestamp"] = timestamp(b.NOW + timedelta(seconds=made_s))
    return {**pod, **{part: {**pod[part], **fields} for part, fields in parts.items()}}


def nominated(pod: Any) -> Any:
    made = copy.deepcopy(pod)
    made["status"]["nominatedNodeName"] = b.NODE
    return made


def assert_attempt_ends(life: Life, observed: Observed, *, after_s: float, reason: str = reasons.HALF_PLACED) -> Plan:
    """Check that the attempt ends then and not a second earlier."""
    early = life.passes(observed, at_s=after_s - 1)
    assert (early.deletions, early.again_after_s) == ((), 1)
    late = life.passes(observed, at_s=after_s)
    assert late.deletions == tuple(
        kind for kind, there in (("Job", observed.learner), ("Deployment", observed.deployment)) if there
    )
    assert b.condition(late, reasons.PLACED) == ("False", reason)
    assert life.account.snapshot(n.KEY).promised is None
    return late


@MODES
@pytest.mark.parametrize("words", [NO_CLAIM, f"didn't match pod affinity rules, {NO_ROOM}"])
def test_half_placed_job_releases_node_when_other_pod_is_unschedulable(mode: str, words: str) -> None:
    life = Life(mode=mode)
    observed = half(life.children(), words)
    assert words in assert_attempt_ends(life, observed, after_s=REFUSED_S).status["message"]


@pytest.mark.parametrize(("mode", "sees_nodes"), [("Reserve", True), ("Scheduler", True), ("Reserve", False)])
def test_placement_retry_pause_doubles_and_frees_room_for_other_jobs(mode: str, sees_nodes: bool) -> None:
    life, at_s = Life(mode=mode, sees_nodes=sees_nodes), 0.0
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        observed = half(life.children(at_s=at_s), at=b.NOW + timedelta(seconds=at_s))
        assert life.passes(observed, at_s=at_s + REFUSED_S).deletions == ("Job", "Deployment")
        at_s += REFUSED_S + pause_s
        pause = life.passes(at_s=at_s - 1)
        assert (pause.children, pause.again_after_s) == ((), 1)
        assert b.condition(pause, reasons.PLACED) == ("False", reasons.HALF_PLACED)
        assert life.account.snapshot(n.KEY).promised is None
        assert {"Deployment", "Job"} <= set(b.kinds(life.passes(at_s=at_s)))


def test_placement_retry_pause_is_capped_and_resets_after_success() -> None:
    life = Life()
    children = life.children()
    for _ in range(12):
        life.account.give_up(n.KEY, None)
        life.now += life.account.snapshot(n.KEY).pause_s
    life.account.give_up(n.KEY, None)
    assert life.account.snapshot(n.KEY).pause_s == LONGEST_PAUSE_S
    life.passes(replace(children, pods=tuple(map(bound, ROLES))))
    assert life.account.snapshot(n.KEY).pause_s == 0


@MODES
def test_failed_attempt_planned_twice_counts_once(mode: str) -> None:
    life = Life(mode=mode)
    observed = half(life.children())
    for at_s in (REFUSED_S, REFUSED_S + 1):
        made = life.passes(observed, at_s=at_s)
        assert made.placement
        assert made.placement.failed
    assert life.account.snapshot(n.KEY).pause_s == FIRST_PAUSE_S - 1


def test_resumed_job_skips_placement_retry_pause() -> None:
    life = Life()
    life.passes(half(life.children()), at_s=REFUSED_S)
    life.raw["spec"]["suspend"] = True
    life.passes(at_s=REFUSED_S + 1)
    life.raw["spec"]["suspend"] = False
    assert "Job" in b.kinds(life.passes(at_s=REFUSED_S + 2))


CLAIM = {"spec": {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "one-gpu"}]}}
GATED = {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}}


@MODES
@pytest.mark.parametrize("missing", ROLES)
@pytest.mark.parametrize("made", [None, {}, CLAIM, GATED], ids=["none", "silent", "claims", "gate"])
def test_half_placed_job_releases_node_when_attempt_times_out(
    mode: str, missing: str, made: dict[str, Any] | None
) -> None:
    life = Life(mode=mode)
    (there,) = [role for role in ROLES if role != missing]
    others = () if made is None else (pending(missing, **made),)
    observed = replace(life.children(), pods=(bound(there), *others))
    assert b.condition(life.passes(observed), reasons.PLACED) in WHOLE
    assert_attempt_ends(life, observed, after_s=ATTEMPT_S)


@MODES
@pytest.mark.parametrize(("refused", "there"), [("learner", names.ROLE_ROLLOUT), ("deployment", names.ROLE_LEARNER)])
def test_half_placed_job_releases_node_when_api_server_refuses_other_pod(mode: str, refused: str, there: str) -> None:
    """A ResourceQuota of objects or a webhook takes one of the two, and no controller ever makes the other's pod."""
    life = Life(mode=mode)
    stands: Any = {"pods": (bound(there),), refused: None}
    observed = replace(life.children(), **stands)
    life.passes(observed)
    assert_attempt_ends(life, observed, after_s=ATTEMPT_S)


@MODES
def test_preempting_pod_of_half_placed_job_is_waited_for_until_attempt_times_out(mode: str) -> None:
    life = Life(mode=mode)
    observed = half(life.children())
    assert_attempt_ends(
        life, replace(observed, pods=(observed.pods[0], nominated(observed.pods[1]))), after_s=ATTEMPT_S
    )


def test_preempting_job_without_any_placed_pod_is_given_five_minutes() -> None:
    life = Life()
    pods = tuple(nominated(refused_pod(role)) for role in ROLES)
    observed = replace(life.children(), pods=pods)
    assert_attempt_ends(life, observed, after_s=PREEMPTS_S, reason=reasons.NODE_FULL)


@pytest.mark.parametrize("others", [("z",), ()], ids=["another node first", "the same where there is no other"])
def test_job_refused_by_its_node_moves_and_prefers_another_node(others: tuple[str, ...]) -> None:
    life = Life(n.node(gpus=4), *(n.node(name, gpus=8) for name in others))
    observed = replace(life.children(), pods=tuple(map(refused_pod, ROLES)))
    late = assert_attempt_ends(life, observed, after_s=REFUSED_S, reason=reasons.NODE_FULL)
    assert NO_ROOM in late.status["message"]
    assert b.node_of(life.passes(at_s=REFUSED_S + FIRST_PAUSE_S)) == (*others, b.NODE)[0]


@MODES
def test_failed_pod_kept_by_finalizer_does_not_extend_attempt(mode: str) -> None:
    """A finalizer of others keeps it."""
    life = Life(mode=mode)
    observed = half(life.children())
    kept = ending(b.pod(names.ROLE_LEARNER, name="kept", phase="Failed"))
    assert_attempt_ends(life, replace(observed, pods=(*observed.pods, kept)), after_s=REFUSED_S)


@MODES
def test_terminating_pod_extends_attempt_until_it_is_overdue(mode: str) -> None:
    life = Life(mode=mode)
    observed = replace(life.children(), pods=(bound(names.ROLE_ROLLOUT), ending(b.learner_pod())))
    life.passes(observed)
    assert_attempt_ends(life, observed, after_s=OVERDUE_S)


def trained(mode: str) -> tuple[Life, Observed]:
    """A job whose two pods have had their node since NOW."""
    life = Life(mode=mode)
    observed = replace(life.children(), pods=tuple(map(bound, ROLES)))
    life.passes(observed)
    return life, observed


@MODES
def test_recreated_server_pod_is_waited_for_as_long_as_first_one(mode: str) -> None:
    life, observed = trained(mode)
    observed = replace(observed, pods=(pending(names.ROLE_ROLLOUT, HOUR_S), observed.pods[1]))
    assert_attempt_ends(life, observed, after_s=HOUR_S + ATTEMPT_S)


@MODES
def test_missing_learner_pod_is_waited_for_from_when_it_disappeared(mode: str) -> None:
    life, observed = trained(mode)
    observed = replace(observed, pods=observed.pods[:1], progress=None)
    assert b.condition(life.passes(observed, at_s=HOUR_S), reasons.PLACED) in WHOLE
    assert_attempt_ends(life, observed, after_s=HOUR_S + ATTEMPT_S)


def shut_down(pod: Any, container: str, *, at_s: float) -> Any:
    """A pod as the kubelet of a node that shuts down leaves it; its Job or ReplicaSet keeps it."""
    ready = [{"type": "Ready", "status": "False", "lastTransitionTime": timestamp(b.NOW + timedelta(seconds=at_s))}]
    ended = {
        "phase": "Failed",
        "reason": "Terminated",
        "conditions": ready,
        "containerStatuses": [b.down(container, 137)],
    }
    return {**pod, "status": {**pod["status"], **ended}}


@MODES
def test_half_placed_job_releases_node_when_learner_replacement_exceeds_quota(mode: str) -> None:
    """Its share of a quota went to another pod meanwhile."""
    life, observed = trained(mode)
    servers, learner = observed.pods
    failed = replace(observed, pods=(servers, shut_down(learner, "learner", at_s=HOUR_S)))
    since = binding.learner_unmade_since(failed, life.raw["status"])
    assert since == b.NOW + timedelta(seconds=HOUR_S), "from when it ended events may say why"
    waits_for_its_job = life.passes(failed, at_s=HOUR_S + 600)
    assert b.condition(waits_for_its_job, reasons.PLACED) in WHOLE, "a Job makes the next one after a pause"
    metadata = {**(failed.learner or {})["metadata"], "creationTimestamp": timestamp(b.NOW)}
    learner_job = {**(failed.learner or {}), "metadata": metadata}
    refused = replace(failed, learner=learner_job, learner_refused="exceeded quota: gpus")
    ended = life.passes(refused, at_s=HOUR_S + 660)
    assert b.condition(ended, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    assert b.condition(ended, reasons.LEARNER_RUNNING) == ("False", reasons.POD_REFUSED)
    assert "exceeded quota: gpus" in ended.status["message"]


@MODES
def test_server_replacement_refused_by_quota_is_reported_and_releases_node(mode: str) -> None:
    life, observed = trained(mode)
    servers, learner = observed.pods
    refused = b.refused_by_quota(at=b.NOW + timedelta(seconds=HOUR_S))
    deployment = {**(observed.deployment or {}), "status": refused}
    pods = (shut_down(servers, "server-0", at_s=HOUR_S), learner)
    observed = replace(observed, pods=pods, deployment=deployment)
    made = life.passes(observed, at_s=HOUR_S + 60)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.POD_REFUSED)
    made = life.passes(observed, at_s=HOUR_S + 60 + REFUSED_S)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.HALF_PLACED)
    assert "exceeded quota: gpus" in b.message(made, reasons.PLACED)


def test_learner_job_created_late_is_waited_for_from_its_creation() -> None:
    life = Life()
    written = {"creationTimestamp": timestamp(b.NOW + timedelta(seconds=HOUR_S))}
    children = life.children()
    learner = {**(children.learner or {}), "metadata": {**(children.learner or {})["metadata"], **written}}
    observed = replace(children, learner=learner, pods=(bound(names.ROLE_ROLLOUT),))
    assert b.condition(life.passes(observed, at_s=HOUR_S + 1), reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    ends_now = {"type": reasons.LEARNER_RUNNING, "status": "False", "reason": reasons.OLD_LEARNER_ENDING, "message": ""}
    life.raw["status"] = {"conditions": [{**ends_now, "lastTransitionTime": timestamp(b.NOW)}]}
    last = life.passes(replace(observed, learner=None), at_s=HOUR_S)
    assert b.condition(last, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert "Job" in b.kinds(last)


def too_small(life: Life, **node: Any) -> Observed:
    """Servers that the scheduler gave a node that has no room beside them, and their learner."""
    made = life.passes(nodes_may_come=True)
    life.account.put("Node", n.node(gpus=3, **node))
    life.account.put("Pod", n.bound(names.ROLE_ROLLOUT, 3))
    pods = (bound(names.ROLE_ROLLOUT), refused_pod())
    return b.created(made, pods=pods)


def test_pending_servers_leave_new_node_too_small_for_learner() -> None:
    life = Life(n.node("busy"), n.foreign("busy", gpus=1))
    assert_attempt_ends(life, too_small(life), after_s=REFUSED_S)


def test_servers_stay_on_not_ready_node_that_is_too_small_for_learner() -> None:
    """A learner's pod there may have been bound and may write, though nobody could tell."""
    life = Life(n.node("busy"), n.foreign("busy", gpus=1))
    made = life.passes(too_small(life, not_ready=True), at_s=HOUR_S)
    assert (made.deletions, b.condition(made, reasons.PLACED)) == ((), ("Unknown", reasons.NODE_NOT_READY))


@MODES
def test_job_moves_when_servers_and_learner_land_on_different_nodes(mode: str) -> None:
    life = Life(n.node("busy"), n.foreign("busy", gpus=1), mode=mode)
    made = life.passes(nodes_may_come=True)
    for name in ("x", "y"):
        life.account.put("Node", n.node(name))
    pods = (bound(names.ROLE_ROLLOUT, "y"), bound(names.ROLE_LEARNER, "x"))
    observed = b.created(made, pods=pods)
    late = assert_attempt_ends(life, observed, after_s=REFUSED_S)
    message = "the rollout pod is on y and the learner pod is on x: the whole job moves to one node"
    assert b.message(late, reasons.PLACED) == message
    assert life.account.snapshot(n.KEY).refused == frozenset(), "neither node has refused anything"


@MODES
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ending(bound(names.ROLE_ROLLOUT, "y", name="old")), id="one that is being deleted"),
        pytest.param(
            {**bound(names.ROLE_ROLLOUT, "y", name="old"), "status": {"phase": "Failed"}}, id="one that ended"
        ),
    ],
)
def test_old_pod_ending_on_another_node_does_not_move_job(mode: str, other: Any) -> None:
    life = Life(mode=mode)
    newer = bound(names.ROLE_ROLLOUT, creationTimestamp="2026-01-02T04:00:00Z")
    observed = replace(life.children(), pods=(other, newer, bound(names.ROLE_LEARNER)))
    made = life.passes(observed, at_s=HOUR_S)
    assert made.deletions == ()
    assert b.condition(made, reasons.PLACED) in WHOLE


def test_server_pods_of_deleted_deployment_are_ignored() -> None:
    """It was deleted as the job left x: the garbage collector comes to its ReplicaSet, and to its pods after that."""
    life = Life(n.node("y"))
    children = life.children()
    later = {"creationTimestamp": timestamp(b.NOW + timedelta(seconds=20))}
    deployment, learner = (
        {**child, "metadata": {**child["metadata"], **later}}
        for child in (children.deployment or {}, children.learner or {})
    )
    pods = (bound(names.ROLE_ROLLOUT, "x"), bound(names.ROLE_LEARNER, "y", 20, **later))
    observed = Observed(deployment=deployment, learner=learner, pods=pods, secret=b.secret())
    assert life.passes(observed, at_s=20 + ATTEMPT_S - 1).deletions == ()


def test_unschedulable_pod_is_reported_but_not_moved_when_no_other_node_would_help() -> None:
    life = Life(n.node(), n.node("z"))
    observed = replace(life.children(), pods=tuple(refused_pod(role, NO_CLAIM) for role in ROLES))
    kept = life.passes(observed, at_s=PROMISE_S - 1)
    assert (kept.deletions, b.condition(kept, reasons.PLACED)) == ((), ("False", reasons.UNSCHEDULABLE))
    assert f"placement: {NO_CLAIM}" in b.message(kept, reasons.TRAINING)
    assert life.account.snapshot(n.KEY).promised is not None
    late = life.passes(observed, at_s=PROMISE_S)
    assert (late.deletions, life.account.snapshot(n.KEY).promised) == ((), None)
    assert b.node_of(late) is not None


def test_node_promise_expires_when_quota_refuses_pods() -> None:
    life = Life()
    words = 'pods "x" is forbidden: exceeded quota: gpus'
    children = life.children()
    observed = replace(children, deployment={**(children.deployment or {}), "status": b.refused_by_quota(words)})
    life.passes(observed)
    late = life.passes(observed, at_s=PROMISE_S)
    assert b.condition(late, reasons.PLACED) == ("False", reasons.POD_REFUSED)
    assert words in late.status["message"]
    assert (late.deletions, life.account.snapshot(n.KEY).promised) == ((), None)


@pytest.mark.parametrize("pods", [(), tuple(map(pending, ROLES))], ids=["no pod", "no scheduler"])
def test_node_promise_expires_without_moving_job_when_pods_stay_missing_or_pending(pods: Any) -> None:
    life = Life()
    observed = replace(life.children(), pods=pods)
    life.passes(observed)
    assert life.passes(observed, at_s=PROMISE_S - 1).deletions == ()
    assert life.account.snapshot(n.KEY).promised == b.NODE
    late = life.passes(observed, at_s=PROMISE_S)
    assert (late.deletions, life.account.snapshot(n.KEY).promised) == ((), None)
    assert b.condition(late, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)


def test_node_promise_of_drained_job_lasts_from_when_its_pods_last_ran() -> None:
    life, observed = trained("Reserve")
    life.passes(observed, at_s=HOUR_S)
    drained = replace(observed, pods=(), progress=None)
    life.passes(drained, at_s=HOUR_S + 1)
    life.passes(drained, at_s=HOUR_S + PROMISE_S - 1)
    assert life.account.snapshot(n.KEY).promised == b.NODE


def test_refusal_from_before_other_pod_was_bound_does_not_end_attempt_early() -> None:
    """A node that comes for a job that waits: the scheduler gives it to its two pods one after the other."""
    life = Life(n.node("small", gpus=3))
    pending_children = life.passes(nodes_may_come=True)
    life.account.put("Node", n.node())
    life.account.put("Pod", n.bound(names.ROLE_ROLLOUT, 3))
    children = b.created(pending_children)
    came: datetime = b.NOW + timedelta(seconds=HOUR_S)
    observed = half(children, f"{NO_ROOM}, 1 node(s) didn't match pod affinity rules", came)
    assert_attempt_ends(life, observed, after_s=HOUR_S + REFUSED_S)


@pytest.mark.parametrize("time", [{}, {"lastTransitionTime": None}])
def test_refusal_without_transition_time_counts_from_pod_creation(time: Any) -> None:
    life = Life()
    refused = refused_pod()
    del refused["status"]["conditions"][0]["lastTransitionTime"]
    refused["status"]["conditions"][0] |= time
    observed = half(life.children())
    assert_attempt_ends(life, replace(observed, pods=(observed.pods[0], refused)), after_s=REFUSED_S)
