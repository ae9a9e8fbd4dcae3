"""Events of a job: what changed between two of its statuses, told once."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from stage2_controller import conditions, reasons

_QUIET = {
    reasons.VALID,
    reasons.APPLIED,
    reasons.NOT_CREATED,
    reasons.CONTAINERS_STARTING,
    reasons.WAITING_FOR_SERVERS,
    reasons.OLD_LEARNER_ENDING,
    reasons.QUOTA_PENDING,
    reasons.LEARNER_FINISHED,
    reasons.RELEASED,
    reasons.NOT_SYNCED_YET,
    reasons.NO_STEP_YET,
    reasons.TRAINS,
}
_WARNINGS = {
    reasons.INVALID_SPEC,
    reasons.CHECK_FAILED,
    reasons.QUOTA_REFUSED,
    reasons.WORKLOAD_INACTIVE,
    reasons.NO_PRIORITY_CLASS,
    reasons.QUEUED_TWICE,
    reasons.INTERNAL_ERROR,
    reasons.CHILD_REFUSED,
    reasons.NAME_TAKEN,
    reasons.KUEUE_DISABLED,
    reasons.NO_NODE_FITS,
    reasons.NODE_LOST,
    reasons.NODE_FULL,
    reasons.HALF_PLACED,
    reasons.NODE_NOT_READY,
    reasons.UNSCHEDULABLE,
    reasons.POD_REFUSED,
    reasons.IMAGE_UNAVAILABLE,
    reasons.CONTAINER_CONFIG,
    reasons.SERVER_CRASHED,
    reasons.LEARNER_RETRYING,
    reasons.VERSIONS_DIFFER,
    reasons.CONFIGURATION_ERROR,
    reasons.BACKOFF_LIMIT,
    reasons.DEADLINE_EXCEEDED,
    reasons.START_DEADLINE,
    reasons.LEARNER_FAILED,
}


class Event(NamedTuple):
    """One event for `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Event]:
    """Return an event for each condition whose status or reason is new and worth attention, each reason once."""
    told: dict[str, Event] = {}
    for item in current.get("conditions") or []:
        old = conditions.find(previous, item["type"])
        unchanged = old is not None and (old["status"], old["reason"]) == (item["status"], item["reason"])
        if not unchanged and item["reason"] not in _QUIET:
            kind: Literal["Normal", "Warning"] = "Warning" if item["reason"] in _WARNINGS else "Normal"
            told.setdefault(item["reason"], Event(kind, item["reason"], item["message"]))
    return list(told.values())
