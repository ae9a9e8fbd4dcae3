"""A job of which one pod has a node and the other none: for how long that is nothing to speak of, and its end. Pure.

One pod holds GPUs for nothing then. Both go after a while, whatever the reason is, and the job tries again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stage2_controller import conditions, reasons
from stage2_controller.conditions import Condition, Truth
from stage2_controller.observed import Observed
from stage2_controller.place import binding, diagnose
from stage2_controller.place.binding import Refusal
from stage2_controller.place.node_choice import NodeChoice, leave, on
from stage2_controller.place.node_fit import Need
from stage2_controller.spec import names

SETTLED_S = 10.0  # pods of one job are bound one after the other: then a refused one counts as refused
NOT_MADE_S = 60.0  # a child, a learner pod, or claims, that nobody makes: what refuses them is said by no pod
NOT_JUDGED_S = 300.0  # a busy cluster makes pods, and looks for their nodes, one after the other
HALF_PLACED_S = 60.0  # one pod holds a node and the other has none: then both go, and stay away for as long


@dataclass(frozen=True)
class _Finding:
    """What is wrong with a place: since when, for how long that is nothing to speak of, and what is said of it."""

    since: datetime
    settles_s: float
    while_held: str
    at_the_end: str


def undone(
    asked: Need, node: str, observed: Observed, *, status: Mapping[str, Any], now: datetime
) -> NodeChoice | None:
    """Return what half a job on a node comes to: its pods go after a while, whatever the reason. None: it is whole."""
    found = _apart(observed) or _half(asked, node, observed, status, now)
    if found is None:
        return None
    left = conditions.seconds_left(found.since, found.settles_s, now)
    if left > 0:
        return replace(on(asked, node), again_after_s=left)
    noted = _told_half(status, "Unknown")
    if noted:  # that Placed became Unknown for another reason may be longer ago
        noted = max(noted, found.since + timedelta(seconds=found.settles_s))
    left = conditions.seconds_left(noted, HALF_PLACED_S, now) if noted else HALF_PLACED_S
    if left > 0:
        told = Condition(reasons.PLACED, "Unknown", reasons.HALF_PLACED, found.while_held)
        return NodeChoice(asked, node, told, again_after_s=left)
    return leave(asked, reasons.HALF_PLACED, found.at_the_end)


def _apart(observed: Observed) -> _Finding | None:
    """Return the finding for servers and learner that have come to two nodes: room of one is kept where it is not."""
    found = binding.apart(observed)
    if found is None:
        return None
    nodes, since = found
    there = " and ".join(f"the {role} pod is on {node}" for role, node in nodes.items())
    held = f"{there}; they stay for {HALF_PLACED_S:g} s at most"
    return _Finding(since, SETTLED_S, held, f"{there}: the whole job moves to one node")


def _half(asked: Need, node: str, observed: Observed, status: Mapping[str, Any], now: datetime) -> _Finding | None:
    """Return the finding for a job of which one pod holds the node and the other has none."""
    found = binding.half_placed(observed, {pod.role for pod in asked.pods}, status, now)
    if found is None or _waited_for_old_learner(status):
        return None
    missing, since = found
    refusal = binding.refusal(observed, now)
    why = f" ({refusal.message})" if refusal else f" (kubectl describe the {missing} pod, or what makes it)"
    held = f"the {missing} pod has no node{why}; the other holds {node} for {HALF_PLACED_S:g} s at most"
    end = f"the {missing} pod found no node{why}: the other gave {node} back"
    return _Finding(since, _patience_s(missing, observed, refusal, now), held, end)


def _waited_for_old_learner(status: Mapping[str, Any]) -> bool:
    """Return whether an old learner was still there a moment ago: the new one's Job is written in this pass."""
    told = conditions.find(status, reasons.LEARNER_RUNNING)
    return told is not None and told["reason"] == reasons.OLD_LEARNER_ENDING


def _patience_s(missing: str, observed: Observed, refusal: Refusal | None, now: datetime) -> float:
    """Return for how long a pod without a node is nothing to speak of, in seconds."""
    pod = binding.newest(observed, now)[missing]
    if binding.nominated(pod):
        return binding.NOMINATED_S
    if refusal or (pod and conditions.find(pod.get("status", {}), "PodScheduled")):  # refused, or held by a gate
        return SETTLED_S
    if pod is None:
        silent = missing == names.ROLE_LEARNER or binding.child_of(observed, missing) is None
    else:
        silent = diagnose.unmade_claims(pod) is not None
    return NOT_MADE_S if silent else NOT_JUDGED_S


def pause(asked: Need, status: Mapping[str, Any], now: datetime) -> NodeChoice | None:
    """Return no place for a job that was half placed a moment ago: others have their turn. None if it was not."""
    since = _told_half(status, "False")
    left = conditions.seconds_left(since, HALF_PLACED_S, now) if since else 0.0
    if left <= 0:
        return None
    told = conditions.find(status, reasons.PLACED) or {}
    again = Condition(reasons.PLACED, "False", reasons.HALF_PLACED, told["message"])
    return NodeChoice(asked, None, again, again_after_s=left, claim="none")


def _told_half(status: Mapping[str, Any], truth: Truth) -> datetime | None:
    """Return since when the status tells that the job is half placed (Unknown) or was (False)."""
    told = conditions.find(status, reasons.PLACED)
    if told is None or (told["status"], told["reason"]) != (truth, reasons.HALF_PLACED):
        return None
    return conditions.instant(told["lastTransitionTime"])
