"""The place of a job in this pass: the node that it has, one that is chosen now, or none, and why. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from stage2_controller import conditions, reasons
from stage2_controller.conditions import Condition
from stage2_controller.observed import Object, Observed, terminating
from stage2_controller.place import binding, half_placed, node_fit
from stage2_controller.place.binding import Refusal
from stage2_controller.place.half_placed import NOT_JUDGED_S
from stage2_controller.place.node_choice import LOOK_AGAIN_S, NodeChoice, first, leave, on
from stage2_controller.place.node_fit import Autoscaling, Need, NodeInfo
from stage2_controller.place.pod_defaults import PodDefaults
from stage2_controller.spec import names
from stage2_controller.spec.key import Key

# The scheduler may need a moment, and a pod that is about to preempt others is refused at first.
REFUSED_FOR_S = 15.0
PROMISED_S = 60.0  # room is kept for pods that cannot be bound for a reason that no node would mend
_WAITED_FOR = (reasons.NO_NODE_FITS, reasons.UNSCHEDULABLE, reasons.POD_REFUSED)


class NodeAccount(Protocol):
    """An account of what nodes have free; `stage2_controller.place.capacity.Capacity` is one."""

    def nodes_for(self, key: Key, need: Need) -> Sequence[NodeInfo]:
        """Return all nodes as they are for this job."""
        ...

    def node_for(self, key: Key, need: Need, name: str) -> NodeInfo | None:
        """Return one of them; None if there is no such node."""
        ...

    def excluded(self, key: Key) -> Sequence[str]:
        """Return the hosts of the nodes that were refused to the job a while ago."""
        ...

    def promised(self, key: Key) -> str | None:
        """Return the node on which the job has room kept."""
        ...

    def sees_why(self, key: Key, need: Need, node: str) -> bool:
        """Return whether it is known why the node does not take the whole job; its own pods there count as free."""
        ...


@dataclass(frozen=True)
class NodeView:
    """The nodes in the eyes of one job."""

    account: NodeAccount
    key: Key
    defaults: PodDefaults = field(default_factory=PodDefaults)  # what the API server adds to the job's pods
    autoscaling: Autoscaling = field(default_factory=Autoscaling)


def place(
    asked: Need,
    observed: Observed,
    view: NodeView,
    *,
    status: Mapping[str, Any],
    now: datetime,
    host: str | None = None,
) -> NodeChoice:
    """Return the place of a job that is to run.

    status: the one that the last pass wrote; host: the label kubernetes.io/hostname of the job's only node.
    """
    asked = replace(view.defaults.added_to(asked), host=host)
    found = _place(asked, observed, view, status=status, now=now)
    if found.node is None and found.tied:
        return found
    found = _beside_old_learner(found, observed, now) or found
    return _lapsing(_looking_again(found, observed, now), observed, status, now)


def _place(asked: Need, observed: Observed, view: NodeView, *, status: Mapping[str, Any], now: datetime) -> NodeChoice:
    current = current_node(observed)
    if current is None and (pause := half_placed.pause(asked, status, now)):
        return pause
    kept = current or view.account.promised(view.key)
    if kept:
        info = view.account.node_for(view.key, asked, kept)
        # Pods that are tied to nothing were refused other nodes.
        of_node = observed if current else replace(observed, pods=())
        if current and info and info.ready and _came_too_small(asked, current, observed, view):
            return leave(asked, reasons.NODE_FULL, f"node {current} has no room for the whole job, which leaves it")
        found = _stay(asked, kept, info, of_node, status=status, now=now)
        if found.node or current or found.refused:
            return found
        # Nothing stands there: no child's end would bring another pass, and nothing has to end first.
    nodes = view.account.nodes_for(view.key, asked)
    node = node_fit.choose_node(asked, nodes)
    if node:
        return on(asked, node)
    told = Condition(reasons.PLACED, "False", reasons.NO_NODE_FITS, node_fit.why_none_fits(asked, nodes))
    nowhere = NodeChoice(asked, None, told, again_after_s=LOOK_AGAIN_S, claim="waits")
    if node_fit.may_be_made(asked, nodes, view.autoscaling) and not node_fit.only_kept(asked, nodes):
        return replace(nowhere, tied=False, avoid=node_fit.half_rooms(asked, nodes, view.autoscaling))
    return nowhere


def _came_too_small(asked: Need, node: str, observed: Observed, view: NodeView) -> bool:
    """Return whether the scheduler gave half of a job that is tied to no node one that has no room for the other."""
    if tied_to(observed):
        return False
    roles = [pod.role for pod in asked.pods]
    return 0 < len(_bound(observed, roles)) < len(roles) and view.account.sees_why(view.key, asked, node)


def follow(
    need: Need, observed: Observed, view: NodeView | None, *, status: Mapping[str, Any], now: datetime
) -> NodeChoice | None:
    """Return the place of a job whose node the scheduler finds; None while there is nothing to decide."""
    node = current_node(observed)
    held = _beside_old_learner(NodeChoice(need, node, None), observed, now)
    if held and held.node is None:
        return held
    if node:
        away = _turned_away(need, node, observed, now)
        found = away or half_placed.undone(need, node, observed, status=status, now=now)
    else:
        found = half_placed.pause(need, status, now)
    if found:
        refused = node if found.node is None and not binding.apart(observed) else None
        return replace(found, tied=found.node is None, claim="none", refused=refused)
    # The scheduler would choose the same node again: nothing has changed there.
    shun = tuple(sorted(view.account.excluded(view.key))) if view else ()
    found = _looking_again(NodeChoice(need, None, None, tied=False, shun=shun, claim="none"), observed, now)
    return found if shun or found.again_after_s is not None else None


def _looking_again(found: NodeChoice, observed: Observed, now: datetime) -> NodeChoice:
    """Return the place, with another pass when a pod that is waited for has had its time: nothing else may happen."""
    return replace(found, again_after_s=first(found.again_after_s, binding.seconds_of_grace(observed, now)))


def _beside_old_learner(found: NodeChoice, observed: Observed, now: datetime) -> NodeChoice | None:
    """Return what an old learner makes of a place; None where there is none of any node.

    It may still write, and the new one waits for its end. Servers may load meanwhile on its own node alone, and not for
    ever: elsewhere nobody would come to them if that node does not answer.
    """
    old = observed.old_learner()
    node = old["spec"].get("nodeName") if old else None
    if old is None or node is None:
        return None
    if found.node == node and not binding.overdue(old, now):
        left = binding.seconds_to_overdue(old, now) if terminating(old) else None
        return replace(found, again_after_s=first(found.again_after_s, left))
    message = (
        f"pod {old['metadata']['name']} of an old learner has not ended on node {node} and may still write, so no pod"
        f" of the job starts; where the node is off for good, kubectl delete node {node} ends the pod, or the taint"
        " node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    told = Condition(reasons.PLACED, "False", reasons.OLD_LEARNER_ENDING, message)
    return NodeChoice(found.need, None, told, again_after_s=LOOK_AGAIN_S, claim="none")


def current_node(observed: Observed) -> str | None:
    """Return the node on which the job's children stand; None if there are none, or none that is told one."""
    if node := tied_to(observed):
        return node
    live = (pod["spec"].get("nodeName") for pod in observed.pods if not terminating(pod))
    return next(filter(None, live), None) if standing(observed) else None  # the scheduler found it


def standing(observed: Observed) -> list[Object]:
    """Return the children that have pods and are not about to go."""
    return [child for child in (observed.learner, observed.deployment) if child is not None and not terminating(child)]


def tied_to(observed: Observed) -> str | None:
    """Return the node to which the job's children were tied when they were made."""
    nodes = ((child["metadata"].get("annotations") or {}).get(names.ANNOTATION_NODE) for child in standing(observed))
    return next((str(node) for node in nodes if node), None)


def _stay(
    asked: Need, node: str, info: NodeInfo | None, observed: Observed, *, status: Mapping[str, Any], now: datetime
) -> NodeChoice:
    """The node that the job has, unless it cannot go on there."""
    if info is None:
        return leave(asked, reasons.NODE_LOST, f"node {node} is gone: the whole job moves")
    if not node_fit.may_use(asked, info):
        told = f"Kueue assigned the host {asked.host}, which is not node {node}: the whole job moves"
        return leave(asked, reasons.NODE_LOST, told)
    if info.out_of_service:
        return leave(asked, reasons.NODE_LOST, f"node {node} is out of service: the whole job moves")
    if not info.ready:
        return _wait_for(asked, node, observed)
    if away := _turned_away(asked, node, observed, now):
        return away
    refusal = binding.refusal(observed, now)
    if refusal and refusal.of_node:
        return _refused(asked, node, refusal, _waited_until(status, now), now)
    if half := half_placed.undone(asked, node, observed, status=status, now=now):
        return half
    return _kept_waiting(asked, node, refusal, now) if refusal else on(asked, node)


def _turned_away(asked: Need, node: str, observed: Observed, now: datetime) -> NodeChoice | None:
    """A node that the scheduler gave and whose kubelet takes no pod of the job: another one may."""
    told = binding.turned_away(observed, node, now)
    if told is None:
        return None
    return replace(leave(asked, reasons.NODE_FULL, f"{told}: the whole job moves"), refused=node)


def _refused(asked: Need, node: str, refusal: Refusal, waited: datetime | None, now: datetime) -> NodeChoice:
    """A node that the scheduler refuses, which may think better of it; then another one may do.

    waited: until when the job waited for something else, whose refusals say nothing of this node.
    """
    left = conditions.seconds_left(max(refusal.since, waited or refusal.since), REFUSED_FOR_S, now)
    if left > 0:
        return replace(on(asked, node), again_after_s=left)
    told = f"node {node} has no room any more: the whole job moves ({refusal.message})"
    return replace(leave(asked, reasons.NODE_FULL, told), refused=node, refused_zone=refusal.of_zone)


def _waited_until(status: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return until when the job waited for a node to come, or for what no node would mend; None if it did not.

    A pod that is refused all the while is refused since the first time, whatever the reason is by now.
    """
    placed = conditions.find(status, reasons.PLACED)
    if placed is None:
        return None
    if placed["status"] == "True":
        return conditions.instant(placed["lastTransitionTime"])
    return now if placed["reason"] in _WAITED_FOR else None


def _kept_waiting(asked: Need, node: str, refusal: Refusal, now: datetime) -> NodeChoice:
    """A refusal that no other node would mend: nothing moves, and its sentence is told. Room is not kept for ever."""
    told = Condition(reasons.PLACED, "False", refusal.reason, refusal.message)
    left = conditions.seconds_left(refusal.since, PROMISED_S, now)
    if left > 0:
        return NodeChoice(asked, node, told, again_after_s=left)
    return NodeChoice(asked, node, told, claim="lapsed")


def _lapsing(found: NodeChoice, observed: Observed, status: Mapping[str, Any], now: datetime) -> NodeChoice:
    """Return the place, whose room is not kept for ever for pods that nobody makes, or for which no scheduler looks.

    One that is half placed is undone.
    Where no child stands, each pass that writes them takes the room anew, if it is still there.
    """
    roles = [pod.role for pod in found.need.pods]
    missing = [role for role in roles if observed.pod(role) is None]
    since = _waits_for_pods_since(observed, roles, status)
    if found.node is None or found.claim != "promised" or since is None or _bound(observed, roles):
        return found
    if current_node(observed) is None:
        return found if conditions.seconds_left(since, PROMISED_S, now) > 0 else replace(found, claim="tries")
    refused = (conditions.find(status, reasons.CHILDREN_APPLIED) or {}).get("reason") == reasons.CHILD_REFUSED
    behind = not missing or (names.ROLE_ROLLOUT in missing and not refused)
    left = conditions.seconds_left(since, NOT_JUDGED_S if behind else PROMISED_S, now)
    if left > 0:
        return replace(found, again_after_s=first(found.again_after_s, left))
    lacks = f"no pod exists yet of {' and '.join(missing)}" if missing else "no scheduler has spoken of its pods yet"
    message = f"the place is on {found.node}; its room is no longer kept: {lacks}"
    told = Condition(reasons.PLACED, "True", reasons.NODE_CHOSEN, message)
    return replace(found, condition=told, claim="lapsed")


def _waits_for_pods_since(observed: Observed, roles: Sequence[str], status: Mapping[str, Any]) -> datetime | None:
    """Return since when a job may have waited for its pods; None while its place is not told.

    A pod that was ready and is gone was there until its condition changed.
    """
    placed = conditions.find(status, reasons.PLACED)
    if placed is None or placed["status"] != "True":
        return None
    told = [conditions.find(status, kind) for kind in (reasons.ROLLOUT_READY, reasons.LEARNER_RUNNING)]
    times = [item["lastTransitionTime"] for item in (placed, *told) if item]
    children = (binding.child_of(observed, role) for role in roles)
    made = (*children, *(observed.pod(role) for role in roles))
    times += [one["metadata"].get("creationTimestamp") for one in made if one]
    return max(conditions.instant(time) for time in times if time)


def _bound(observed: Observed, roles: Sequence[str]) -> list[str]:
    """Return those of the roles whose pod has a node."""
    return [role for role in roles if (observed.pod(role) or {"spec": {}})["spec"].get("nodeName")]


def _wait_for(asked: Need, node: str, observed: Observed) -> NodeChoice:
    """A node that does not answer may still run the learner, which writes: only a person knows that it does not."""
    servers, learner = (observed.pod(role) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    gone = servers is None or terminating(servers) or not servers["spec"].get("nodeName")
    if gone and (learner is None or not learner["spec"].get("nodeName")):
        return leave(asked, reasons.NODE_LOST, f"node {node} is not ready: the whole job moves")
    message = (
        f"node {node} is not ready; a learner there may still write, so the job stays until the node is back, is"
        " deleted (kubectl delete node), or has the taint node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    return NodeChoice(asked, node, Condition(reasons.PLACED, "Unknown", reasons.NODE_NOT_READY, message))
