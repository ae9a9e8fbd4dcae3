"""A place that is chosen for a job in this pass: its node, or none and why. Pure."""

from dataclasses import dataclass
from typing import Literal

from stage2_controller import reasons
from stage2_controller.conditions import Condition
from stage2_controller.place.node_fit import Avoided, Need

LOOK_AGAIN_S = 60.0
"""Seconds until a job without a place looks again: what is missing may change without anything being free for it."""


@dataclass(frozen=True)
class NodeChoice:
    """The job's node, or none: it fits nowhere, or has to leave its node as a whole."""

    need: Need
    node: str | None
    condition: Condition | None  # None: there is nothing to say
    refused: str | None = None  # the node that the scheduler would not give to the job
    refused_zone: bool = False  # and nor would the others of its zone
    again_after_s: float | None = None
    tied: bool = True  # its pods are tied to the node, and there are none without one; else the scheduler finds it
    avoid: Avoided = ()  # nodes that pods which are not tied must leave alone
    shun: tuple[str, ...] = ()  # hosts that they take last: one of them had room for half of the job
    # Of room, in the account of the nodes. tries: promised, unless the API server refuses a child in this pass.
    claim: Literal["promised", "tries", "lapsed", "waits", "none"] = "promised"


def on(asked: Need, node: str) -> NodeChoice:
    """Return the place on a node that has room for all of the job."""
    message = f"servers and learner have their place on {node}"
    return NodeChoice(asked, node, Condition(reasons.PLACED, "True", reasons.NODE_CHOSEN, message))


def leave(asked: Need, reason: str, message: str) -> NodeChoice:
    """Return the place of a job that leaves its node as a whole, for this reason of the condition Placed."""
    told = Condition(reasons.PLACED, "False", reason, message)
    return NodeChoice(asked, None, told, again_after_s=LOOK_AGAIN_S, claim="waits")


def first(*seconds: float | None) -> float | None:
    """Return the shortest of these times, if there is any."""
    return min((some for some in seconds if some is not None), default=None)
