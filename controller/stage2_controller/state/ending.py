"""Pods that are being deleted: when each should have ended, and which have not. Pure."""

from datetime import datetime, timedelta

from stage2_controller.state import conditions
from stage2_controller.state.observed import Object, Observed, ended, terminating

OVERDUE_S = 300.0
"""How long a pod may outlive its deletion's grace period: then its node does not answer, or something holds it."""


def overdue(pod: Object, now: datetime) -> bool:
    """Return whether the pod should have ended long ago."""
    return terminating(pod) and seconds_to_overdue(pod, now) <= 0


def seconds_to_overdue(pod: Object, now: datetime) -> float:
    """Return the seconds until a pod that is being deleted counts as one that does not end."""
    return conditions.seconds_left(told_at(pod), _grace_s(pod) + OVERDUE_S, now)


def told_at(pod: Object) -> datetime:
    """Return when the deletion of a pod was requested."""
    return conditions.instant(pod["metadata"]["deletionTimestamp"]) - timedelta(seconds=_grace_s(pod))


def _grace_s(pod: Object) -> float:
    return pod["metadata"].get("deletionGracePeriodSeconds") or 0.0


def seconds_to_next_overdue(observed: Observed, now: datetime) -> float | None:
    """Return the seconds until one more pod that is being deleted is overdue; None if none is about to."""
    left = [seconds_to_overdue(pod, now) for pod in observed.pods if terminating(pod) and not ended(pod)]
    return min((seconds for seconds in left if seconds > 0), default=None)


def overdue_pods(observed: Observed, now: datetime) -> list[Object]:
    """Return the pods that keep a node although they should have ended long ago."""
    return [pod for pod in observed.pods if not ended(pod) and pod["spec"].get("nodeName") and overdue(pod, now)]
