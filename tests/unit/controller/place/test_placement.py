"""A job's place through its life: chosen before anything exists, kept, and left only as a whole."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.place.capacity import Capacity
from stage2_controller.place.placement import LOOK_AGAIN_S, choose
from stage2_controller.plan.result import Plan
from stage2_controller.state import reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n


def planned(
    raw: Any, account: Capacity, observed: Observed = b.NOTHING, *, after_s: float = 0, nodes_may_come: bool = False
) -> Plan:
    return b.plan(
        raw,
        observed,
        settings=replace(b.SETTINGS, nodes_may_come=nodes_may_come),
        now=b.NOW + timedelta(seconds=after_s),
        snapshot=account.snapshot(n.KEY),
    )


def placed(raw: Any, account: Capacity) -> Observed:
    """What is observed of a job that trains on the node that was chosen for it."""
    made = planned(raw, account, b.pods_alone(b.rollout_pod(True, True, True)))
    assert made.placement
    assert made.placement.node
    account.promise(n.KEY, made.placement.need, made.placement.node)
    return b.trains(made)


def test_job_that_fits_no_node_creates_no_children_and_stays_pending() -> None:
    made = planned(b.job(), n.capacity(n.node(gpus=3)))
    assert made.children == ()
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert made.status["message"] == "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a"
    assert made.status["phase"] == reasons.PENDING


def test_servers_and_learner_are_pinned_to_chosen_node() -> None:
    made = planned(b.job(), n.capacity(n.node("a"), n.node("b", 3)), b.pods_alone(b.rollout_pod(True, True, True)))
    for kind in ("Deployment", "Job"):
        affinity = b.child(made, kind)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["a"]}]
    assert b.node_of(made) == "a"


def test_job_stays_on_its_node_when_better_one_appears() -> None:
    account = n.capacity(n.node(gpus=8))
    observed = placed(b.job(), account)
    account.put("Node", n.node("tight", gpus=4))
    made = planned(b.job(), account, observed)
    assert b.node_of(made) == b.NODE
    assert made.deletions == ()


def test_whole_job_moves_when_its_node_is_deleted() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = placed(b.job(), account)
    account.remove("Node", n.node())
    made = planned(b.job(), account, observed)
    assert made.deletions == ("Job", "Deployment")
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NODE_LOST)
    account.wait(n.KEY, made.placement.need if made.placement else pytest.fail("no site"))
    again = planned(b.job(), account, Observed())
    assert b.node_of(again) == "z"


def test_job_that_leaves_deleted_node_is_reconciled_again_soon() -> None:
    account = n.capacity(n.node())
    observed = replace(placed(b.job(), account), learner=None, pods=())
    account.remove("Node", n.node())
    made = planned(b.job(), account, observed)
    assert made.deletions == ("Deployment",)
    assert made.again_after_s is not None
    assert made.again_after_s <= LOOK_AGAIN_S


def test_promised_node_deleted_before_children_exist_is_replaced_at_once() -> None:
    account = n.capacity(n.node("a"), n.node("z"))
    first = planned(b.job(), account).placement
    assert first
    assert first.node == "a"
    account.promise(n.KEY, first.need, "a")
    account.remove("Node", n.node("a"))
    made = planned(b.job(), account)
    assert b.node_of(made) == "z"
    account.promise(n.KEY, made.placement.need, "z")
    account.remove("Node", n.node("z"))
    nowhere = planned(b.job(), account)
    assert b.condition(nowhere, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert nowhere.again_after_s == LOOK_AGAIN_S


def test_promised_node_is_used_though_another_fits_better() -> None:
    account = n.capacity(n.node("tight", 4), n.node("wide", 8))
    account.promise(n.KEY, n.FOUR, "wide")
    assert b.node_of(planned(b.job(), account)) == "wide"


@pytest.mark.parametrize("host", [None, "gone"])
def test_host_bound_job_creates_no_pods_that_wait_for_new_node(host: str | None) -> None:
    place = choose(
        replace(n.FOUR, host=host),
        b.NOTHING,
        n.capacity(n.node(gpus=1)).snapshot(n.KEY),
        by_scheduler=False,
        nodes_may_come=True,
        status={},
        now=b.NOW,
    )
    assert (place.node, place.tied) == (None, host is not None)


def test_out_of_service_node_counts_as_lost() -> None:
    account = n.capacity(n.node())
    observed = placed(b.job(), account)
    taint = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
    account.put("Node", n.node(taints=[taint]))
    assert b.condition(planned(b.job(), account, observed), reasons.PLACED) == ("False", reasons.NODE_LOST)


def test_not_ready_node_keeps_learner_that_may_still_write() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = placed(b.job(), account)
    account.put("Node", n.node(not_ready=True))
    made = planned(b.job(), account, observed)
    assert made.deletions == ()
    assert b.condition(made, reasons.PLACED) == ("Unknown", reasons.NODE_NOT_READY)
    assert "kubectl delete node" in made.status["message"]


def test_not_ready_node_loses_evicted_servers_if_learner_never_existed() -> None:
    account = n.capacity(n.node(), n.node("z"))
    observed = replace(placed(b.job(), account), learner=None, pods=())
    account.put("Node", n.node(not_ready=True))
    assert planned(b.job(), account, observed).deletions == ("Deployment",)


def refused_pod(role: str = names.ROLE_LEARNER, words: str = "1 Insufficient nvidia.com/gpu") -> Any:
    reported = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": words,
        "lastTransitionTime": timestamp(b.NOW),
    }
    return b.pod(role, node=None, conditions=[reported])


NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "data" not found. not found'


def half(observed: Observed, words: str = NO_CLAIM, at: datetime = b.NOW) -> Observed:
    """What is observed when the servers have their node and the learner has none."""
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(at)}
    servers = b.pod(names.ROLE_ROLLOUT, b.up("server-0", ready=False), conditions=[bound])
    return replace(observed, pods=(servers, refused_pod(words=words)), progress=None)


def test_scheduler_mode_pods_are_not_pinned_to_node() -> None:
    made = planned(b.job(placement={"mode": "Scheduler"}), n.capacity(n.node(gpus=1)))
    servers, learner = (b.child(made, kind)["spec"]["template"]["spec"] for kind in ("Deployment", "Job"))
    assert "affinity" not in servers
    assert "podAffinity" in learner["affinity"]
    assert "mode" not in servers


def test_pending_pods_for_autoscaler_are_pinned_once_scheduler_found_node() -> None:
    account = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(b.job(), account, nodes_may_come=True)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    servers, learner = (b.child(made, kind)["spec"]["template"]["spec"]["affinity"] for kind in ("Deployment", "Job"))
    (term,) = servers["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["busy"]}]}
    assert list(learner) == ["podAffinity"]
    pods = tuple(refused_pod(role) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    waits = b.created(made, pods=pods)
    account.put("Node", n.node("new"))
    account.wait(n.KEY, made.placement.need if made.placement else pytest.fail("no place"))
    assert account.serve() == [n.KEY]
    tied = planned(b.job(), account, waits, after_s=600)  # that others refused them for long says nothing of this one
    assert tied.placement
    assert (tied.placement.node, tied.deletions) == ("new", ("Job", "Deployment"))
    account.promise(n.KEY, tied.placement.need, "new")
    assert b.child(planned(b.job(), account), "Job")["metadata"]["annotations"][names.ANNOTATION_NODE] == "new"


@pytest.mark.parametrize("may_come", [True, False])
def test_pods_are_created_pending_only_if_new_nodes_may_come(may_come: bool) -> None:
    made = planned(b.job(), n.capacity(n.node("small", 3)), nodes_may_come=may_come)
    assert b.condition(made, reasons.PLACED) == ("False", reasons.NO_NODE_FITS)
    assert ("Deployment" in {child["kind"] for child in made.children}) is may_come


def test_pods_bound_to_new_node_by_scheduler_stay_there() -> None:
    account = n.capacity(n.node("busy"), n.foreign("busy", gpus=1))
    made = planned(b.job(), account, nodes_may_come=True)
    account.put("Node", n.node())
    pods = (b.rollout_pod(False, False, False), b.waiting_learner_pod())
    observed = b.created(made, pods=pods)
    found = planned(b.job(), account, observed)
    assert (found.deletions, b.condition(found, reasons.PLACED)) == ((), ("True", reasons.NODE_CHOSEN))
    assert b.node_of(found) == b.NODE


def test_priority_class_decides_whether_job_preempts() -> None:
    account = n.capacity(n.node(), n.foreign(gpus=4, priority=5))
    waits = planned(b.job(), account).placement
    assert waits
    assert waits.node is None
    high = {"value": 10, "preemptionPolicy": "PreemptLowerPriority"}
    assert b.kinds(planned(b.job(), account, Observed(pod_priority_class=high)))[-1] == "Job"
    never = {"value": 10, "preemptionPolicy": "Never"}
    assert b.kinds(planned(b.job(), account, Observed(pod_priority_class=never))) == []


def test_suspended_or_finished_job_needs_no_placement() -> None:
    account = n.capacity(n.node())
    observed = placed(b.job(), account)
    assert planned(b.job(suspend=True), account, observed).placement is None
    complete = b.learner_job(planned(b.job(), account, observed), b.job_condition("Complete"))
    assert planned(b.job(), account, replace(observed, learner=complete)).placement is None


def test_job_started_before_node_selection_existed_stays_on_its_node() -> None:
    raw = b.job()
    made = planned(raw, n.capacity(n.node(), n.node("z")), b.started(raw))
    assert made.deletions == ()
    assert b.node_of(made) == b.NODE
