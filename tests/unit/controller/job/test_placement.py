"""A job's place through its life: chosen before anything exists, kept, and left only as a whole."""

import copy
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.conditions import timestamp
from stage2_controller.observed import Observed
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.half_placed import HALF_PLACED_S, NOT_JUDGED_S, NOT_MADE_S, SETTLED_S
from stage2_controller.place.node_choice import LOOK_AGAIN_S
from stage2_controller.place.node_fit import Autoscaling
from stage2_controller.place.placement import PROMISED_S, REFUSED_FOR_S, NodeView
from stage2_controller.place.pod_defaults import PodDefaults
from stage2_controller.plan import Plan, plan
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n


def planned(raw: Any, account: Capacity, observed: Observed = b.NOTHING, *, after_s: float = 0, **more: Any) -> Plan:
    return plan(
        raw,
        observed,
        settings=b.SETTINGS,
        now=b.NOW + timedelta(seconds=after_s),
        new_credentials=b.new_credentials,
        nodes=NodeView(account, n.KEY, **more),
    )


def placed(raw: Any, account: Capacity) -> Observed:
    """What is observed of a job that trains on the node that was chosen for it."""
    made = planned(raw, account, Observed(pods=(b.rollout_pod(True, True, True),)))
    assert made.placement
    assert made.placement.node
    account.promise(n.KEY, made.placement.need, made.placement.node)
    return Observed(
        deployment=b.child(made, "Deployment"),
        service=b.child(made, "Service"),
        networkpolicy=b.child(made, "NetworkPolicy"),
        configmap=b.child(made, "ConfigMap"),
        secret=b.child(made, "Secret"),
        learner=b.learner_job(made),
        pods=(b.rollout_pod(True, True, True), b.learner_pod()),
        progress=b.report(),
    )


def test_nothing_is_created_for_a_job_that_fits_nowhere() -> None:
    made = planned(b.job(), n.capacity(n.node(gpus=3)))
    assert made.children == ()
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert made.status["message"] == "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a"
    assert made.status["phase"] == reasons.PENDING


def test_both_pods_are_tied_to_the_chosen_node_and_to_no_other() -> None:
    made = planned(b.job(), n.capacity(n.node("a"), n.node("b", 3)), Observed(pods=(b.rollout_pod(True, True, True),)))
    for kind in ("Deployment", "Job"):
        affinity = b.child(made, kind)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["a"]}]
    assert made.placement
    assert made.placement.node == "a"


def test_a_job_keeps_its_node_though_a_better_one_comes() -> None:
    account = n.capacity(n.node(gpus=8))
    observed = placed(b.job(), account)
    account.put("Node", n.node("tight", gpus=4))
    made = planned(b.job(), account, observed)
    assert made.placement
    assert made.placement.node == b.NODE
    assert made.deletions == ()


def test_the_whole_job_moves_when_its_node_is_gone() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = placed(b.job(), account)
    account.remove("Node", n.node())
    made = planned(b.job(), account, observed)
    assert made.deletions == ("Job", "Deployment")
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NODE_LOST)
    account.wait(n.KEY, made.placement.need if made.placement else pytest.fail("no site"))
    again = planned(b.job(), account, Observed())
    assert again.placement
    assert again.placement.node == "z"


def test_a_job_that_has_to_leave_is_looked_at_again_even_if_nothing_more_happens() -> None:
    account = n.capacity(n.node())
    observed = replace(placed(b.job(), account), learner=None, pods=())
    account.remove("Node", n.node())
    made = planned(b.job(), account, observed)
    assert (made.deletions, made.again_after_s) == (("Deployment",), LOOK_AGAIN_S)


def test_a_promised_node_that_goes_before_the_job_has_children_is_replaced_at_once() -> None:
    account = n.capacity(n.node("a"), n.node("z"))
    first = planned(b.job(), account).placement
    assert first
    assert first.node == "a"
    account.promise(n.KEY, first.need, "a")
    account.remove("Node", n.node("a"))
    made = planned(b.job(), account)
    assert made.placement
    assert made.placement.node == "z"
    account.promise(n.KEY, made.placement.need, "z")
    account.remove("Node", n.node("z"))
    nowhere = planned(b.job(), account)
    assert b.condition(nowhere, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert nowhere.again_after_s == LOOK_AGAIN_S


def test_a_node_out_of_service_is_a_lost_one() -> None:
    account = n.capacity(n.node())
    observed = placed(b.job(), account)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    account.put("Node", n.node(taints=[taint]))
    assert b.condition(planned(b.job(), account, observed), reasons.PLACED) == ("False", reasons.NODE_LOST)


def test_a_silent_node_keeps_a_learner_that_may_still_write() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = placed(b.job(), account)
    account.put("Node", n.node(not_ready=True))
    made = planned(b.job(), account, observed)
    assert made.deletions == ()
    assert b.condition(made, reasons.PLACED) == ("Unknown", reasons.NODE_NOT_READY)
    assert "kubectl delete node" in made.status["message"]


def test_a_silent_node_loses_servers_that_were_evicted_before_a_learner_existed() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = replace(placed(b.job(), account), learner=None, pods=())
    account.put("Node", n.node(not_ready=True))
    assert planned(b.job(), account, observed).deletions == ("Deployment",)


def refused_pod(role: str = names.ROLE_LEARNER, words: str = "1 Insufficient nvidia.com/gpu") -> Any:
    told = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": words,
        "lastTransitionTime": timestamp(b.NOW),
    }
    return b.pod(role, node=None, conditions=[told])


NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "data" not found. not found'


def test_a_refusal_that_no_other_node_would_mend_moves_nothing_and_is_told() -> None:
    account = n.capacity(n.node(), n.node("z"))
    pods = tuple(refused_pod(role, NO_CLAIM) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    observed = replace(placed(b.job(), account), pods=pods, progress=None)
    made = planned(b.job(), account, observed, after_s=PROMISED_S - 1)
    assert (made.deletions, b.condition(made, reasons.PLACED)) == ((), ("False", reasons.UNSCHEDULABLE))
    assert f"placement: {NO_CLAIM}" in b.message(made, reasons.TRAINING)
    assert made.placement
    assert made.placement.claim == "promised"
    late = planned(b.job(), account, observed, after_s=PROMISED_S)
    assert late.deletions == ()
    assert late.placement
    assert (late.placement.node, late.placement.claim) == (b.NODE, "lapsed")


@pytest.mark.parametrize(
    "told",
    [
        "didn't match PersistentVolume's node affinity",
        "had volume node affinity conflict",
        "had no available volume zone",
    ],
    ids=["1.34", "before", "VolumeZone"],
)
def test_a_volume_of_another_zone_moves_the_job_out_of_this_one(told: str) -> None:
    account = n.capacity(n.node())
    words = f"0/1 nodes are available: 1 node(s) {told}."
    observed = replace(placed(b.job(), account), pods=(refused_pod(names.ROLE_ROLLOUT, words),), progress=None)
    left = planned(b.job(), account, observed, after_s=REFUSED_FOR_S).placement
    assert left
    assert (left.refused, left.refused_zone) == (b.NODE, True)


def test_room_is_not_kept_for_ever_for_pods_that_a_quota_refuses() -> None:
    account = n.capacity(n.node())
    words = 'pods "x" is forbidden: exceeded quota: gpus'
    failure = {"type": "ReplicaFailure", "status": "True", "message": words, "lastTransitionTime": timestamp(b.NOW)}
    observed = placed(b.job(), account)
    refused = {**(observed.deployment or {}), "status": {"conditions": [failure]}}
    observed = replace(observed, deployment=refused, pods=(), progress=None)
    made = planned(b.job(), account, observed, after_s=PROMISED_S)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.POD_REFUSED)
    assert words in made.status["message"]
    assert made.placement
    assert made.placement.claim == "lapsed"


def half(observed: Observed, words: str = NO_CLAIM, at: datetime = b.NOW) -> Observed:
    """What is observed when the servers have their node and the learner has none."""
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(at)}
    servers = b.pod(names.ROLE_ROLLOUT, b.up("server-0", ready=False), conditions=[bound])
    return replace(observed, pods=(servers, refused_pod(words=words)), progress=None)


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
def test_a_half_placed_job_gives_its_half_back_lets_others_go_first_and_tries_again(mode: str) -> None:
    raw = b.job(placement={"mode": mode})
    account = n.capacity(n.node())
    words = NO_CLAIM if mode == "Reserve" else "didn't match pod affinity rules, Insufficient nvidia.com/gpu"
    first = planned(raw, account)
    observed = half(Observed(deployment=b.child(first, "Deployment"), learner=b.learner_job(first)), words)
    soon = planned(raw, account, observed, after_s=SETTLED_S - 1)
    assert soon.again_after_s == 1
    noted = planned(raw, account, observed, after_s=SETTLED_S)
    assert (noted.deletions, b.condition(noted, reasons.PLACED)) == ((), ("Unknown", reasons.HALF_PLACED))
    assert words in noted.status["message"]
    raw = b.told(raw, noted)
    assert planned(raw, account, observed, after_s=SETTLED_S + HALF_PLACED_S - 1).deletions == ()
    undone = planned(raw, account, observed, after_s=SETTLED_S + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")
    raw, gone_at_s = b.told(raw, undone), SETTLED_S + HALF_PLACED_S
    pause = planned(raw, account, Observed(), after_s=gone_at_s + HALF_PLACED_S - 1)
    assert (pause.children, pause.again_after_s) == ((), 1)
    again = planned(raw, account, Observed(), after_s=gone_at_s + HALF_PLACED_S)
    assert {"Deployment", "Job"} <= set(b.kinds(again))


def test_a_job_whose_node_was_silent_has_its_minute_too() -> None:
    """Both conditions are Unknown, so that the second has the time at which the first began."""
    raw, account, back_s = b.job(), n.capacity(n.node()), 600.0
    there = placed(raw, account)
    account.put("Node", n.node(not_ready=True))
    silent = planned(raw, account, there)
    assert b.condition(silent, reasons.PLACED) == ("Unknown", reasons.NODE_NOT_READY)
    raw = b.told(raw, silent)
    account.put("Node", n.node())
    observed = half(there, at=b.NOW + timedelta(seconds=back_s))
    noted = planned(raw, account, observed, after_s=back_s + SETTLED_S)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    raw = b.told(raw, noted)
    assert planned(raw, account, observed, after_s=back_s + SETTLED_S + HALF_PLACED_S - 1).deletions == ()
    undone = planned(raw, account, observed, after_s=back_s + SETTLED_S + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment")


CLAIM = {"spec": {"resourceClaims": [{"name": "c", "resourceClaimTemplateName": "one-gpu"}]}}
GATED = {"status": {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}}


@pytest.mark.parametrize(
    ("missing", "made", "patience_s"),
    [
        (names.ROLE_ROLLOUT, None, NOT_JUDGED_S),
        (names.ROLE_ROLLOUT, {}, NOT_JUDGED_S),
        (names.ROLE_LEARNER, {}, NOT_JUDGED_S),
        (names.ROLE_LEARNER, None, NOT_MADE_S),
        (names.ROLE_LEARNER, CLAIM, NOT_MADE_S),
        (names.ROLE_ROLLOUT, CLAIM, NOT_MADE_S),
        (names.ROLE_LEARNER, GATED, SETTLED_S),
    ],
)
def test_a_cluster_that_is_behind_with_the_other_pod_is_waited_for(
    missing: str, made: dict[str, Any] | None, patience_s: float
) -> None:
    """A thousand jobs at once: the Deployment controller and the scheduler take minutes, and refuse nobody."""
    raw, account = b.job(), n.capacity(n.node())
    there = names.ROLE_LEARNER if missing == names.ROLE_ROLLOUT else names.ROLE_ROLLOUT
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(b.NOW)}
    pods = [b.pod(there, conditions=[bound])]
    if made is not None:
        other = b.pod(missing, node=None)
        pods.append({**other, **{part: {**other[part], **fields} for part, fields in made.items()}})
    observed = replace(placed(raw, account), pods=tuple(pods), progress=None)
    raw = b.told(raw, planned(raw, account, observed))
    waits = planned(raw, account, observed, after_s=patience_s - 1)
    assert b.condition(waits, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert waits.again_after_s == 1
    noted = planned(raw, account, observed, after_s=patience_s)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    undone = planned(b.told(raw, noted), account, observed, after_s=patience_s + HALF_PLACED_S)
    assert undone.deletions == ("Job", "Deployment"), "not for ever"


@pytest.mark.parametrize("mode", ["Reserve", "Scheduler"])
@pytest.mark.parametrize(("refused", "there"), [("Job", names.ROLE_ROLLOUT), ("Deployment", names.ROLE_LEARNER)])
def test_a_pod_whose_other_half_the_api_server_refuses_as_a_child_gives_its_node_back(
    mode: str, refused: str, there: str
) -> None:
    """A ResourceQuota of objects or a webhook takes one of the two, and no controller ever makes the other's pod."""
    raw, account = b.job(placement={"mode": mode}), n.capacity(n.node())
    made = planned(raw, account)
    children = {"Deployment": b.child(made, "Deployment"), "Job": b.learner_job(made), refused: None}
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(b.NOW)}
    pods = (b.pod(there, conditions=[bound]),)
    observed = Observed(deployment=children["Deployment"], learner=children["Job"], pods=pods)
    raw = b.told(raw, planned(raw, account, observed))
    waits = planned(raw, account, observed, after_s=NOT_MADE_S - 1)
    assert (waits.deletions, waits.again_after_s) == ((), 1)
    noted = planned(raw, account, observed, after_s=NOT_MADE_S)
    assert b.condition(noted, reasons.PLACED) == ("Unknown", reasons.HALF_PLACED)
    undone = planned(b.told(raw, noted), account, observed, after_s=NOT_MADE_S + HALF_PLACED_S)
    assert undone.deletions == ("Deployment" if refused == "Job" else "Job",)


def test_a_learner_job_that_is_written_late_has_its_minute_from_then() -> None:
    raw, account, late_s = b.job(), n.capacity(n.node()), 3600.0
    there = placed(raw, account)
    observed = replace(half(there), pods=half(there).pods[:1])
    written = timestamp(b.NOW + timedelta(seconds=late_s))
    made = {**(there.learner or {})}
    made["metadata"] = {**made["metadata"], "creationTimestamp": written}
    waits = planned(raw, account, replace(observed, learner=made), after_s=late_s + 1)
    assert b.condition(waits, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    ends = [{"type": reasons.LEARNER_RUNNING, "status": "False", "reason": reasons.OLD_LEARNER_ENDING}]
    told = {**raw, "status": {"conditions": [{**ends[0], "message": "", "lastTransitionTime": written}]}}
    last = planned(told, account, replace(observed, learner=None), after_s=late_s)
    assert b.condition(last, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
    assert "Job" in b.kinds(last)


def test_a_job_that_is_left_to_the_scheduler_has_pods_that_are_tied_to_no_node() -> None:
    made = planned(b.job(placement={"mode": "Scheduler"}), n.capacity(n.node(gpus=1)))
    servers, learner = (b.child(made, kind)["spec"]["template"]["spec"] for kind in ("Deployment", "Job"))
    assert "affinity" not in servers
    assert "podAffinity" in learner["affinity"]
    assert "mode" not in servers


def test_where_a_node_may_come_pods_are_pending_in_words_that_an_autoscaler_understands() -> None:
    account = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(b.job(), account)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    servers, learner = (b.child(made, kind)["spec"]["template"]["spec"]["affinity"] for kind in ("Deployment", "Job"))
    (term,) = servers["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["busy"]}]}
    assert list(learner) == ["podAffinity"]
    pods = tuple(refused_pod(role) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    waits = Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made), pods=pods)
    account.put("Node", n.node("new"))
    account.wait(n.KEY, made.placement.need if made.placement else pytest.fail("no place"))
    assert account.serve() == [n.KEY]
    tied = planned(b.job(), account, waits, after_s=600)  # that others refused them for long says nothing of this one
    assert tied.placement
    assert (tied.placement.node, tied.deletions) == ("new", ("Job", "Deployment"))
    account.promise(n.KEY, tied.placement.need, "new")
    assert b.child(planned(b.job(), account), "Job")["metadata"]["annotations"][names.ANNOTATION_NODE] == "new"


@pytest.mark.parametrize(("sign", "pending"), [(Autoscaling(), False), (Autoscaling("always"), True)])
def test_where_every_node_is_too_small_pods_are_pending_if_others_may_come(sign: Autoscaling, pending: bool) -> None:
    made = planned(b.job(), n.capacity(n.node("small", 3)), autoscaling=sign)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert ("Deployment" in {child["kind"] for child in made.children}) is pending


def test_pending_pods_that_the_scheduler_has_bound_to_a_new_node_stay_there() -> None:
    account = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(b.job(), account)
    account.put("Node", n.node())
    pods = (b.rollout_pod(False, False, False), b.waiting_learner_pod())
    observed = Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made), pods=pods)
    found = planned(b.job(), account, observed)
    assert (found.deletions, b.condition(found, reasons.PLACED)) == ((), ("True", reasons.NODE_CHOSEN))
    assert found.placement
    assert found.placement.node == b.NODE


def test_pending_servers_leave_a_new_node_that_is_too_small_for_the_learner_at_once() -> None:
    account = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(b.job(), account)
    account.put("Node", n.node(gpus=3))
    account.put("Pod", n.bound(names.ROLE_ROLLOUT, 3))
    pods = (b.rollout_pod(False, False, False), refused_pod())
    observed = Observed(deployment=b.child(made, "Deployment"), learner=b.learner_job(made), pods=pods)
    found = planned(b.job(), account, observed)
    assert (found.deletions, b.condition(found, reasons.PLACED)) == (
        ("Job", "Deployment"),
        ("False", reasons.NODE_FULL),
    )


def test_a_job_whose_node_became_full_gives_everything_back_after_a_moment() -> None:
    account = n.capacity(n.node())
    observed = replace(placed(b.job(), account), pods=(b.rollout_pod(True, True, True), refused_pod()))
    early = planned(b.job(), account, observed, after_s=1)
    assert (early.deletions, early.again_after_s) == ((), REFUSED_FOR_S - 1)
    late = planned(b.job(), account, observed, after_s=REFUSED_FOR_S)
    assert late.deletions == ("Job", "Deployment")
    assert b.condition(late, reasons.PLACED) == ("False", reasons.NODE_FULL)
    assert "Insufficient nvidia.com/gpu" in late.status["message"]


def test_a_pod_that_preempts_others_is_given_time() -> None:
    account = n.capacity(n.node())
    pod = refused_pod()
    pod["status"]["nominatedNodeName"] = b.NODE
    observed = replace(placed(b.job(), account), pods=(b.rollout_pod(True, True, True), pod))
    assert planned(b.job(), account, observed, after_s=299).deletions == ()


def test_a_learner_that_preempts_others_beside_its_servers_is_given_time() -> None:
    account = n.capacity(n.node())
    observed = half(placed(b.job(), account))
    observed.pods[1]["status"]["nominatedNodeName"] = b.NODE
    made = planned(b.job(), account, observed, after_s=299)
    assert b.condition(made, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)


def test_the_priority_class_decides_what_may_be_preempted() -> None:
    account = n.capacity(n.node(), n.foreign(gpus=4, priority=5))
    waits = planned(b.job(), account).placement
    assert waits
    assert waits.node is None
    high = {"value": 10, "preemptionPolicy": "PreemptLowerPriority"}
    assert b.kinds(planned(b.job(), account, defaults=PodDefaults(default_class=high)))[-1] == "Job"


def test_a_suspended_or_finished_job_needs_no_place() -> None:
    account = n.capacity(n.node())
    observed = placed(b.job(), account)
    assert planned(b.job(suspend=True), account, observed).placement is None
    complete = b.learner_job(planned(b.job(), account, observed), b.job_condition("Complete"))
    assert planned(b.job(), account, replace(observed, learner=complete)).placement is None


def test_a_new_learner_waits_until_the_old_one_has_written_its_checkpoint() -> None:
    account = n.capacity(n.node(gpus=8))
    old = copy.deepcopy(b.learner_pod())
    old["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    made = planned(b.job(), account, Observed(pods=(b.rollout_pod(True, True, True), old)))
    assert "Job" not in b.kinds(made)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.OLD_LEARNER_ENDING)


def test_a_job_that_started_before_nodes_were_chosen_goes_on_where_it_is() -> None:
    raw = b.job()
    made = planned(raw, n.capacity(n.node(), n.node("z")), b.started(raw))
    assert made.deletions == ()
    assert made.placement
    assert made.placement.node == b.NODE
