"""Evictions of a job's pods by the kubelet, for lack of memory, disk or process IDs: count, pause and bound. Pure.

A drain, a preemption or the shutdown of a node is none: it says nothing about what the job takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stage2_controller.state import conditions, diagnose, ending, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed, terminating

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
_LISTED = 512  # pods of one job: more than that are never there at once
KEPT = ("evictedPods",)
"""Keys of the status that outlive a failure: pods that were evicted before it do not count again."""


@dataclass(frozen=True)
class Evictions:
    """The evictions of a job since it was started or resumed.

    counted: uids of evicted pods, so that each counts once, though it may not be seen for a while. last: what the
    kubelet said of the newest. node: where this pass saw a new one; None if it saw none.
    """

    count: int = 0
    counted: tuple[str, ...] = ()
    last: str | None = None
    node: str | None = None

    def status(self) -> dict[str, Any]:
        """Return the part of the status that is about evictions."""
        return {"evictions": self.count, "evictedPods": list(self.counted), "lastEviction": self.last}

    @property
    def pause_s(self) -> float:
        """Seconds until the job starts again after the last eviction."""
        return min(FIRST_PAUSE_S * 2.0 ** max(self.count - 1, 0), LONGEST_PAUSE_S)

    def condition(self, limit: int) -> Condition:
        """Return the condition Placed of a job that makes a pause. limit: spec.evictionLimit."""
        message = (
            f"{self.last}: the whole job starts again after {self.pause_s:g} s (eviction {self.count} of at most"
            f" {limit}, spec.evictionLimit)"
        )
        return Condition(reasons.PLACED, "False", reasons.EVICTED, message)


def of_job(status: Mapping[str, Any], observed: Observed, *, suspended: bool, ended: bool) -> Evictions:
    """Return the evictions that the last pass counted, and those that this one sees.

    status: the one that the last pass wrote. suspended: the count restarts once the job is resumed. ended: nothing
    counts any more.
    """
    known = Evictions(status.get("evictions") or 0, tuple(status.get("evictedPods") or ()), status.get("lastEviction"))
    gone = sorted(filter(diagnose.is_evicted, observed.pods), key=_evicted_at)
    uids = tuple(dict.fromkeys((*known.counted, *(str(pod["metadata"]["uid"]) for pod in gone))))[-_LISTED:]
    if ended:
        return Evictions(known.count, uids, known.last)
    by_older_controller = "startTime" in status and "evictions" not in status  # it counted none: an upgrade adds none
    if suspended or by_older_controller:
        return Evictions(counted=uids)
    new = [pod for pod in gone if pod["metadata"]["uid"] not in known.counted and not _was_leaving(pod)]
    if not new:
        return Evictions(known.count, uids, known.last)
    newest = new[-1]
    node = newest.get("spec", {}).get("nodeName") or ""
    return Evictions(known.count + len(new), uids, diagnose.how_evicted(newest), node)


def pause_left_s(found: Evictions, status: Mapping[str, Any], now: datetime) -> float:
    """Return the seconds until the job may start again; 0 without a pause."""
    if found.node is not None:
        return found.pause_s
    placed = conditions.find(status, reasons.PLACED) or {}
    if (placed.get("status"), placed.get("reason")) != ("False", reasons.EVICTED):
        return 0.0
    since = conditions.instant(placed["lastTransitionTime"])
    return max(conditions.seconds_left(since, found.pause_s, now), 0.0)


def _was_leaving(pod: Object) -> bool:
    """Return whether the pod was already ending: the job had given up its node, which is still under pressure."""
    at, _ = _evicted_at(pod)
    return terminating(pod) and bool(at) and conditions.instant(at) > ending.told_at(pod)


def _evicted_at(pod: Object) -> tuple[str, str]:
    """Return what orders evicted pods: when their containers were ended, then their names."""
    disrupted = conditions.find(pod.get("status", {}), "DisruptionTarget") or {}
    return disrupted.get("lastTransitionTime") or "", pod["metadata"]["name"]
