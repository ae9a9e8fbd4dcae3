"""The place of a job in one pass: the node that it has, one that is chosen now, or none, and why. Pure.

Servers and learner get one node, before any of their pods exists, and leave it together. The scheduler binds them, and
has the last word: an attempt whose pods do not all get the node ends, and the next one begins after a pause that
doubles.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_controller.job import names
from stage2_controller.job.names import Key
from stage2_controller.place import binding, node_fit
from stage2_controller.place.binding import Incomplete
from stage2_controller.place.capacity import FIRST_PAUSE_S, LONGEST_PAUSE_S, PROMISE_S, Capacity, Snapshot
from stage2_controller.place.node_fit import Avoided, Need, NodeInfo
from stage2_controller.state import conditions, ending, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed, terminating

LOOK_AGAIN_S = 60.0
"""Seconds until a job without a place looks again: its need may change although no room becomes free."""
_FAILED = (("False", reasons.HALF_PLACED), ("False", reasons.NODE_FULL))


@dataclass(frozen=True)
class Place:
    """The job's node, or none: it fits nowhere, has to leave its node, or the scheduler finds one."""

    need: Need
    node: str | None
    condition: Condition | None = None  # Placed; None: there is nothing to report
    tied: bool = True  # its pods are tied to the node, and there are none without one; False: the scheduler finds it
    avoid: Avoided = ()  # labels of nodes that pods which are not tied must leave alone
    avoid_if_possible: tuple[str, ...] = ()  # hosts that such pods take last: one of them had room for half of the job
    keep_for_s: float = 0.0  # how long room on the node is kept for pods that are not bound
    is_complete: bool = False  # all pods are bound to the node
    waits: bool = False  # for room that becomes free
    failed: bool = False  # an attempt ends with this pass
    refused: str | None = None  # the node that did not take the whole job
    again_after_s: float | None = None


def choose(
    need: Need,
    observed: Observed,
    snapshot: Snapshot,
    *,
    by_scheduler: bool,
    nodes_may_come: bool,
    status: Mapping[str, Any],
    now: datetime,
) -> Place:
    """Return the place of a job that is to run.

    by_scheduler: the scheduler finds the node; nodes_may_come: a job that fits nowhere has pending pods, for an
    autoscaler to see; status: the one that the last pass wrote.
    """
    if observed.over_quota:
        return _over_quota(need, observed.over_quota, status, now)
    node = current_node(observed)
    if by_scheduler or not snapshot.sees_nodes:
        place = _follow_scheduler(need, node, observed, snapshot, status, now)
    elif node:
        place = _stay(need, node, observed, snapshot, status, now)
    else:
        place = _pause(need, snapshot, status) or _find(need, snapshot, nodes_may_come)
    if place.node is None and place.tied:
        return place
    left_s = ending.seconds_to_next_overdue(observed, now)
    place = replace(place, again_after_s=soonest(place.again_after_s, left_s))
    return _beside_old_learner(place, node, observed, snapshot, now)


def record(place: Place | None, capacity: Capacity, key: Key, *, started_at: str) -> None:
    """Enter a place into the account of the nodes. started_at: the job's status.startTime."""
    if place and place.is_complete:
        capacity.succeed(key)
    if place is None:
        capacity.release(key)
    elif place.failed:
        capacity.give_up(key, place.refused)
    elif place.node:
        capacity.promise(key, place.need, place.node, for_s=place.keep_for_s)
    elif place.waits:
        capacity.wait(key, place.need, started_at=started_at)
    else:
        capacity.unclaim(key)


def current_node(observed: Observed) -> str | None:
    """Return the node on which the job's children stand; None if there are none, or none of their pods has a node."""
    if node := tied_to(observed):
        return node
    live = (pod["spec"].get("nodeName") for pod in observed.pods if not terminating(pod))
    return next(filter(None, live), None) if standing(observed) else None


def standing(observed: Observed) -> list[Object]:
    """Return the children that have pods and are not being deleted."""
    return [child for child in (observed.learner, observed.deployment) if child is not None and not terminating(child)]


def tied_to(observed: Observed) -> str | None:
    """Return the node to which the job's children were tied when they were created."""
    nodes = ((child["metadata"].get("annotations") or {}).get(names.ANNOTATION_NODE) for child in standing(observed))
    return next((str(node) for node in nodes if node), None)


def soonest(*seconds: float | None) -> float | None:
    """Return the shortest of these times, if there is any."""
    return min((some for some in seconds if some is not None), default=None)


def _find(need: Need, snapshot: Snapshot, nodes_may_come: bool) -> Place:
    """Return the node that has room for the whole job: the promised one, or the best."""
    promised = snapshot.node_for(need, snapshot.promised) if snapshot.promised else None
    nodes = snapshot.nodes_for(need)
    node = node_fit.choose_node(need, [promised]) if promised else None
    node = node or node_fit.choose_node(need, nodes)
    if node:
        return _chosen(need, node)
    why = Condition(reasons.PLACED, "False", reasons.NO_NODE_FITS, node_fit.why_none_fits(need, nodes))
    nowhere = Place(need, None, why, waits=True, again_after_s=LOOK_AGAIN_S)
    if nodes_may_come and need.host is None:  # no new node is the host that Kueue assigned
        return replace(nowhere, tied=False, avoid=node_fit.half_rooms(need, nodes))
    return nowhere


def _stay(
    need: Need, node: str, observed: Observed, snapshot: Snapshot, status: Mapping[str, Any], now: datetime
) -> Place:
    """Return the node that the job has, unless it cannot continue there."""
    info = snapshot.node_for(need, node)
    if lost := _why_lost(need, node, info):
        return _leave_node(need, reasons.NODE_LOST, f"{lost}: the whole job moves")
    if info and not info.ready:
        return _wait_for_silent(need, node, observed)
    place = _attempt(need, node, observed, status, now)
    if info and info.cordoned and (place.failed or binding.is_leaving(observed, [pod.role for pod in need.pods])):
        why = f"node {node} is cordoned, as by kubectl drain: the whole job moves; kubectl uncordon {node} lets it back"
        return _leave_node(need, reasons.NODE_DRAINED, why)
    return place


def _why_lost(need: Need, node: str, info: NodeInfo | None) -> str | None:
    if info is None:
        return f"node {node} is gone"
    if not node_fit.may_use(need, info):
        return f"Kueue assigned the host {need.host}, which is not node {node}"
    return f"node {node} is out of service" if info.out_of_service else None


def _attempt(need: Need, node: str, observed: Observed, status: Mapping[str, Any], now: datetime) -> Place:
    """Return the job's node, or the end of an attempt whose pods did not all get it."""
    if message := binding.turned_away(observed, node, now):
        return _give_up(need, reasons.NODE_FULL, f"{message}: the whole job moves", refused=node)
    found = binding.incomplete(observed, [pod.role for pod in need.pods], status, now)
    if found is None:
        return replace(_chosen(need, node), is_complete=not any(observed.unseen(pod.role) for pod in need.pods))
    left_s = conditions.seconds_left(found.since, found.limit_s, now) if found.limit_s is not None else None
    if left_s is not None and left_s <= 0:
        reason = reasons.HALF_PLACED if found.nodes else reasons.NODE_FULL
        return _give_up(need, reason, _why_failed(found, node), refused=None if found.is_apart else node)
    keep_for_s = conditions.seconds_left(found.since, PROMISE_S, now)
    place = replace(_chosen(need, node), keep_for_s=keep_for_s, again_after_s=left_s)
    if found.refusal and not found.nodes and not found.refusal.of_node:
        condition = Condition(reasons.PLACED, "False", found.refusal.reason, found.refusal.message)
        return replace(place, condition=condition)
    return place


def _why_failed(found: Incomplete, node: str) -> str:
    why = f" ({found.refusal.message})" if found.refusal else ""
    if found.is_apart:
        there = " and ".join(f"the {role} pod is on {node}" for role, node in found.nodes.items())
        return f"{there}: the whole job moves to one node"
    if not found.nodes:
        return f"node {node} does not take the job: the whole job moves{why}"
    missing = " and ".join(found.missing)
    return f"the {missing} pod got no node{why}: the other pod gives {node} up"


def _follow_scheduler(
    need: Need,
    node: str | None,
    observed: Observed,
    snapshot: Snapshot,
    status: Mapping[str, Any],
    now: datetime,
) -> Place:
    """Return the place of a job whose node the scheduler finds: only an attempt that ends is reported."""
    if node:
        place = _attempt(need, node, observed, status, now)
        if place.failed:
            return place
        succeeded, again_after_s = place.is_complete, place.again_after_s
    else:
        if pause := _pause(need, snapshot, status):
            return pause
        succeeded, again_after_s = False, None
    # Otherwise the scheduler would choose the same node again.
    hosts = snapshot.refused_hosts()
    return Place(need, None, tied=False, avoid_if_possible=hosts, is_complete=succeeded, again_after_s=again_after_s)


def _pause(need: Need, snapshot: Snapshot, status: Mapping[str, Any]) -> Place | None:
    """Return no place for a job whose last attempt failed a moment ago: others have their turn."""
    if snapshot.pause_s <= 0:
        return None
    before = conditions.find(status, reasons.PLACED)
    failed = before is not None and (before["status"], before["reason"]) in _FAILED
    condition = Condition(reasons.PLACED, "False", before["reason"], before["message"]) if before and failed else None
    return Place(need, None, condition, again_after_s=snapshot.pause_s)


def _over_quota(need: Need, message: str, status: Mapping[str, Any], now: datetime) -> Place:
    """Return no place. The job looks again after as long as it has waited: in pauses that double, up to a limit."""
    before = conditions.find(status, reasons.PLACED) or {}
    waits = before.get("reason") == reasons.QUOTA_EXCEEDED
    waited_s = (now - conditions.instant(before["lastTransitionTime"])).total_seconds() if waits else 0.0
    condition = Condition(reasons.PLACED, "False", reasons.QUOTA_EXCEEDED, message)
    return Place(need, None, condition, again_after_s=min(max(waited_s, FIRST_PAUSE_S), LONGEST_PAUSE_S))


def _beside_old_learner(place: Place, node: str | None, observed: Observed, snapshot: Snapshot, now: datetime) -> Place:
    """Return the place, or none while an old learner of the job runs elsewhere, or does not end: it may still write.

    Servers may load meanwhile on its own node alone, and not for ever: nobody would come to them if that node is
    silent.
    """
    old = observed.old_learner()
    old_node = old["spec"].get("nodeName") if old else None
    if old is None or old_node is None:
        return place
    if (place.node or node) == old_node and not ending.overdue(old, now):
        left_s = ending.seconds_to_overdue(old, now) if terminating(old) else None
        return replace(place, again_after_s=soonest(place.again_after_s, left_s))
    message = (
        f"pod {old['metadata']['name']} of an old learner has not ended on node {old_node} and may still write: the job"
        " waits for it"
    )
    there = snapshot.node_for(place.need, old_node)
    if ending.overdue(old, now) or (snapshot.sees_nodes and not (there and there.ready)):
        message += (
            f"; if the node is off for good, kubectl delete node {old_node} ends the pod, or the taint"
            " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
        )
    condition = Condition(reasons.PLACED, "False", reasons.OLD_LEARNER_ENDING, message)
    return Place(place.need, None, condition, again_after_s=LOOK_AGAIN_S)


def _wait_for_silent(need: Need, node: str, observed: Observed) -> Place:
    """Return the place on a silent node: it may still run the learner, which writes, and only a person can know."""
    servers, learner = (observed.pod(role) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    gone = servers is None or terminating(servers) or not servers["spec"].get("nodeName")
    if gone and (learner is None or not learner["spec"].get("nodeName")):
        return _leave_node(need, reasons.NODE_LOST, f"node {node} is not ready: the whole job moves")
    message = (
        f"node {node} is not ready; a learner there may still write, so the job stays until the node is back, is"
        " deleted (kubectl delete node), or has the taint node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    condition = Condition(reasons.PLACED, "Unknown", reasons.NODE_NOT_READY, message)
    return replace(_chosen(need, node), condition=condition)


def _chosen(need: Need, node: str) -> Place:
    condition = Condition(reasons.PLACED, "True", reasons.NODE_CHOSEN, f"servers and learner are placed on {node}")
    return Place(need, node, condition, keep_for_s=PROMISE_S)


def _leave_node(need: Need, reason: str, message: str) -> Place:
    condition = Condition(reasons.PLACED, "False", reason, message)
    return Place(need, None, condition, waits=True, again_after_s=LOOK_AGAIN_S)


def _give_up(need: Need, reason: str, message: str, *, refused: str | None) -> Place:
    return replace(_leave_node(need, reason, message), waits=False, failed=True, refused=refused)
