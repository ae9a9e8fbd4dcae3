"""The place of a job in this pass: the node that it has, one that is chosen now, or none, and why. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from stage2_controller.job import conditions, names, node_fit, reasons
from stage2_controller.job.conditions import Condition
from stage2_controller.job.key import Key
from stage2_controller.job.node_fit import Need, NodeInfo
from stage2_controller.job.observed import Object, Observed, terminating

# The scheduler may need a moment, and a pod that is about to preempt others is refused at first.
REFUSED_FOR_S = 15.0
LOOK_AGAIN_S = 60.0  # what is missing may have changed without anything being free for this job


class NodeAccount(Protocol):
    """An account of what nodes have free; `stage2_controller.cluster.capacity.Capacity` is one."""

    def nodes_for(self, key: Key, need: Need) -> Sequence[NodeInfo]:
        """Return all nodes as they are for this job."""
        ...

    def node_for(self, key: Key, need: Need, name: str) -> NodeInfo | None:
        """Return one of them; None if there is no such node."""
        ...

    def promised(self, key: Key) -> str | None:
        """Return the node on which the job has room kept."""
        ...


@dataclass(frozen=True)
class NodeView:
    """The nodes in the eyes of one job."""

    account: NodeAccount
    key: Key
    priority_class: Object | None = None  # the one that spec.placement.priorityClassName names

    def with_priority(self, need: Need) -> Need:
        """Return the need with what the PriorityClass says."""
        found = self.priority_class
        if found is None:
            return need
        return replace(need, priority=found["value"], preempts=found.get("preemptionPolicy") != "Never")


@dataclass(frozen=True)
class NodeChoice:
    """The job's node, or none: it fits nowhere, or has to leave its node as a whole."""

    need: Need
    node: str | None
    condition: Condition
    refused: str | None = None  # the node that the scheduler would not give to the job
    again_after_s: float | None = None


def place(asked: Need, observed: Observed, view: NodeView, *, now: datetime, host: str | None = None) -> NodeChoice:
    """Return the place of a job that is to run; `host`: the label kubernetes.io/hostname of its only node."""
    asked = replace(view.with_priority(asked), host=host)
    current = current_node(observed)
    kept = current or view.account.promised(view.key)
    if kept:
        found = _stay(asked, kept, view.account.node_for(view.key, asked, kept), observed, now)
        if found.node or current or found.refused:
            return found
        # Nothing stands there: no child's end would bring another pass, and nothing has to end first.
    nodes = view.account.nodes_for(view.key, asked)
    node = node_fit.choose_node(asked, nodes)
    if node:
        return _on(asked, node)
    told = Condition(reasons.PLACED, "False", reasons.NO_NODE_FITS, node_fit.why_none_fits(asked, nodes))
    return NodeChoice(asked, None, told, again_after_s=LOOK_AGAIN_S)


def current_node(observed: Observed) -> str | None:
    """Return the node on which the job's children stand; None if there are none, or none that is told one."""
    for child in (observed.learner, observed.deployment):
        if child is not None and not terminating(child):
            node = child["metadata"].get("annotations", {}).get(names.ANNOTATION_NODE)
            if node:
                return str(node)
    children = any(child is not None and not terminating(child) for child in (observed.learner, observed.deployment))
    live = (pod["spec"].get("nodeName") for pod in observed.pods if not terminating(pod))
    return next(filter(None, live), None) if children else None  # made before nodes were chosen


def _on(asked: Need, node: str) -> NodeChoice:
    message = f"servers and learner have their place on {node}"
    return NodeChoice(asked, node, Condition(reasons.PLACED, "True", reasons.NODE_CHOSEN, message))


def _stay(asked: Need, node: str, info: NodeInfo | None, observed: Observed, now: datetime) -> NodeChoice:
    """The node that the job has, unless it cannot go on there."""
    if info is None:
        return _leave(asked, reasons.NODE_LOST, f"node {node} is gone: the whole job moves")
    if not node_fit.may_use(asked, info):
        told = f"Kueue assigned the host {asked.host}, which is not node {node}: the whole job moves"
        return _leave(asked, reasons.NODE_LOST, told)
    if info.out_of_service:
        return _leave(asked, reasons.NODE_LOST, f"node {node} is out of service: the whole job moves")
    if not info.ready:
        return _wait_for(asked, node, observed)
    refusal = _refused(observed)
    if refusal is None:
        return _on(asked, node)
    since, message = refusal
    left = REFUSED_FOR_S - (now - since).total_seconds()
    if left > 0:
        return replace(_on(asked, node), again_after_s=left)
    told = f"node {node} has no room any more: the whole job moves ({message})"
    return replace(_leave(asked, reasons.NODE_FULL, told), refused=node)


def _wait_for(asked: Need, node: str, observed: Observed) -> NodeChoice:
    """A node that does not answer may still run the learner, which writes: only a person knows that it does not."""
    servers = observed.pod(names.ROLE_ROLLOUT)
    if observed.learner is None and (servers is None or terminating(servers) or not servers["spec"].get("nodeName")):
        return _leave(asked, reasons.NODE_LOST, f"node {node} is not ready: the whole job moves")
    message = (
        f"node {node} is not ready; a learner there may still write, so the job stays until the node is back, is"
        " deleted (kubectl delete node), or has the taint node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
    return NodeChoice(asked, node, Condition(reasons.PLACED, "Unknown", reasons.NODE_NOT_READY, message))


def _leave(asked: Need, reason: str, message: str) -> NodeChoice:
    told = Condition(reasons.PLACED, "False", reason, message)
    return NodeChoice(asked, None, told, again_after_s=LOOK_AGAIN_S)


def _refused(observed: Observed) -> tuple[datetime, str] | None:
    """Return since when the scheduler refuses a pod of the job, and why; None while its own old pods make way."""
    if any(terminating(pod) for pod in observed.pods):
        return None
    for pod in observed.pods:
        if pod["spec"].get("nodeName") or pod.get("status", {}).get("nominatedNodeName"):
            continue
        for item in pod.get("status", {}).get("conditions", []):
            if item["type"] == "PodScheduled" and item.get("reason") == "Unschedulable":
                return conditions.instant(item["lastTransitionTime"]), item.get("message", "no reason given")
    return None
