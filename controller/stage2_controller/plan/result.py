"""What one pass decides: the result, and what the plans of both engines share. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_controller.children import comparison
from stage2_controller.children.manifest import Manifest
from stage2_controller.job.credentials import Hosts
from stage2_controller.place.placement import Place
from stage2_controller.plan import outcome
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.state import conditions, ending, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import FILES_AGAIN_S, Observed, terminating

Manifests = tuple[Manifest, ...]
NewCredentials = Callable[[Hosts, datetime], Mapping[str, str]]


@dataclass(frozen=True)
class Plan:
    """What a pass writes and deletes, and when to look again.

    A child that is neither in `children` nor of a kind in `deletions` stays as it is.
    """

    status: dict[str, Any]
    children: Manifests = ()  # the writer decides their order
    scaled: Manifest | None = None  # the Job of a JobSet's servers, with another number of pods
    deletions: tuple[str, ...] = ()  # kinds of children
    placement: Place | None = None  # None: the job needs no place
    keeps_place: bool = False  # room kept for the job stays without a `placement`, and the job stops waiting for room
    workload_patch: Mapping[str, Any] | None = None  # for the status of Kueue's Workload
    delete_job: bool = False  # spec.ttlSecondsAfterFinished has passed
    again_after_s: float | None = None


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the wanted kinds of which a child exists that is not being deleted."""
    return tuple(kind for kind in wanted if (child := observed.child(kind)) is not None and not terminating(child))


def learner_stays(job: JobPass, end: Condition) -> bool:
    """Return whether the learner ended by itself: its Job stays, for its log."""
    return end.type == reasons.SUCCEEDED or job.observed.learner_ended()


def with_time_to_live(raw: Mapping[str, Any], observed: Observed, made: Plan, now: datetime) -> Plan:
    """Return the plan of a job that has ended, or is refused: the job is deleted once its time has passed."""
    ttl, failed = raw["spec"].get("ttlSecondsAfterFinished"), conditions.find(made.status, reasons.FAILED) or {}
    ended_at: str | None = made.status.get("completionTime") or failed.get("lastTransitionTime")
    late_s = ending.seconds_to_next_overdue(observed, now)
    if type(ttl) is not int or ttl < 0 or ended_at is None:
        return replace(made, again_after_s=late_s)
    left_s = conditions.seconds_left(conditions.instant(ended_at), ttl, now)
    return replace(made, delete_job=left_s <= 0, again_after_s=soonest(left_s, late_s) if left_s > 0 else None)


def looks(
    job: JobPass, status: Mapping[str, Any], *, blocked: Condition | None, deletions: Sequence[str]
) -> tuple[float | None, ...]:
    """Return the seconds until each pass that both engines need."""
    return (
        0.0 if "Secret" in deletions else None,  # the next pass creates another one
        job.settings.progress_s if status["phase"] == reasons.RUNNING else None,
        FILES_AGAIN_S if job.stands else None,
        ending.seconds_to_next_overdue(job.observed, job.now) if job.must_stop else None,
        outcome.seconds_left(job.parsed.job, status, job.now),
        outcome.seconds_to_start(job.parsed.job, job.observed, status, job.now),
        comparison.LOOK_AGAIN_S[blocked.reason] if blocked else None,
    )


def soonest(*seconds_left: float | None) -> float | None:
    """Return the shortest of these times; None where there is none."""
    return min((max(seconds, 0.0) for seconds in seconds_left if seconds is not None), default=None)
