"""The plan of one pass: from a job and what is observed of it to its place, its children and its status.

Pure: no client, no clock, no randomness. `plan` has the steps in order. Static YAML (`children.build.static_children`)
and local processes (`job.containers`) use the same builders of children.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from stage2_api.errors import ConfigError
from stage2_controller.children import comparison
from stage2_controller.children.build import ParsedJob
from stage2_controller.job import names
from stage2_controller.job.settings import Settings
from stage2_controller.place import binding, node_fit, placement
from stage2_controller.place.capacity import Snapshot
from stage2_controller.place.placement import Place
from stage2_controller.plan import evictions, jobset, outcome
from stage2_controller.plan import status as statuses
from stage2_controller.plan.children import choose_children, workload_patch
from stage2_controller.plan.job_pass import JobPass, job_pass
from stage2_controller.plan.result import (
    NewCredentials,
    Plan,
    existing,
    learner_stays,
    looks,
    soonest,
    with_time_to_live,
)
from stage2_controller.queue import kueue
from stage2_controller.queue.kueue import Admission
from stage2_controller.state import conditions, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Observed


def plan(
    raw: Mapping[str, Any],
    parsed: ParsedJob | Exception,
    observed: Observed,
    *,
    settings: Settings,
    now: datetime,
    new_credentials: NewCredentials,
    snapshot: Snapshot,
) -> Plan:
    """Return the plan of one pass over the job `raw`, an object as the API server holds it.

    parsed: what its spec says, or the exception of parsing it. new_credentials: creates the content of a new Secret.
    snapshot: the nodes. Where the controller may not read them, the scheduler chooses for every job, and the learner
    follows the servers.
    """
    # 1. Is the job ours, and may its spec be planned?
    if raw["spec"].get("managedBy", names.MANAGER) != names.MANAGER:
        return Plan(status=dict(raw.get("status") or {}))
    if isinstance(parsed, ConfigError):
        return _invalid(raw, observed, parsed, now)
    if isinstance(parsed, Exception):
        raise parsed  # a bug in parsing: the caller reports it
    job = job_pass(raw, parsed, observed, settings=settings, now=now)
    if refused := job.refused_start:
        return _invalid(job.raw, job.observed, refused, now)

    # 2. Has it ended?
    end = _end_of(job)

    # 3. Do objects of others stand in its way?
    blocked = None if end else comparison.obstacle(job.observed, job.namespace)

    # 4. Do a JobSet and Kueue place and queue its pods? Then a page of its own decides the rest.
    if job.parsed.of_jobset:
        return jobset.plan(job, end=end, blocked=blocked, new_credentials=new_credentials)

    # 5. Does it have quota?
    admission = _admit(job, end=end, blocked=blocked)

    # 6. Where does it run?
    place = _choose_place(job, snapshot, end=end, blocked=blocked, admission=admission)

    # 7. What does its status report? A job that has ended needs no more: its servers go.
    status = statuses.valid_status(job, end=end, blocked=blocked, quota=admission.condition, place=place)
    if end:
        return _finished(job, status, end=end, admission=admission)

    # 8. Which children exist, which go, and when is the next pass?
    children, deletions = choose_children(
        job,
        blocked=blocked,
        admission=admission,
        place=place,
        new_credentials=new_credentials,
        one_host=snapshot.sees_nodes,
    )
    return Plan(
        status=status,
        children=children,
        deletions=deletions,
        placement=place,
        workload_patch=workload_patch(job, end=end, admission=admission, place=place),
        again_after_s=_next_look(job, status, blocked=blocked, admission=admission, place=place, deletions=deletions),
    )


def _invalid(raw: Mapping[str, Any], observed: Observed, refused: ConfigError, now: datetime) -> Plan:
    """Return the plan for an invalid spec: no child is written.

    Children of an earlier, valid spec stay, unless the job is suspended: deleting them needs no valid spec.
    """
    message = refused.within(conditions.MESSAGE_CHARS)
    final = outcome.final(raw.get("status") or {})
    suspended = raw["spec"].get("suspend") is True and not final
    if observed.learner or observed.deployment or observed.jobset or final:
        status = statuses.unplanned(raw, Condition(reasons.ACCEPTED, "False", reasons.INVALID_SPEC, message), now)
    else:
        status = statuses.invalid_status(raw, message, now)
    deletions = existing(observed, "Job", "Deployment", names.JOBSET) if suspended else ()
    return with_time_to_live(raw, observed, Plan(status=status, deletions=deletions, keeps_place=True), now)


def _end_of(job: JobPass) -> Condition | None:
    """Return whether the job has ended, and how.

    While its learner is of another spec, no new failure counts, not even a deadline: the job is about to start again.
    """
    end = outcome.outcome(
        job.parsed.job,
        job.server_names,
        job.observed,
        spec_hash=job.parsed.spec_hash,
        status=job.previous,
        evicted=job.evictions,
        now=job.now,
    )
    if end and end.type == reasons.FAILED and job.spec_changed and not outcome.final(job.previous):
        return None
    return end


def _admit(job: JobPass, *, end: Condition | None, blocked: Condition | None) -> Admission:
    """Return whether Kueue has admitted the job, and what it adds to the pods."""
    condition = _quota(job, end=end, blocked=blocked)
    admitted = condition is not None and condition.status == "True"
    return Admission(condition, kueue.additions(job.observed) if admitted else {})


def _quota(job: JobPass, *, end: Condition | None, blocked: Condition | None) -> Condition | None:
    """Return the condition QuotaReserved; None where the job names no queue, or needs no quota now."""
    queue, found = job.queue, job.observed.workload
    if queue is None or end or _is_idle(job, blocked=blocked):
        return None
    if not job.settings.kueue:
        return kueue.not_served(queue)
    if kueue.finished(found) or job.has_old_workload:
        return kueue.waits_for_old_workload(queue)
    if unknown := kueue.missing_class(job.raw, job.observed):
        return unknown
    if found and kueue.inactive(found) and not kueue.admitted(found) and not kueue.turned_away(found):
        return kueue.workload_inactive(found, queue)
    return kueue.quota_reserved(job.observed, queue, conditions.find(job.previous, reasons.QUOTA_RESERVED))


def _is_idle(job: JobPass, *, blocked: Condition | None) -> bool:
    """Return whether the job cannot have children and has none: it needs no quota and no place."""
    return blocked is not None and not job.stands


def _choose_place(
    job: JobPass, snapshot: Snapshot, *, end: Condition | None, blocked: Condition | None, admission: Admission
) -> Place | None:
    """Return the place of a job that is to run; None for others.

    The pause after an eviction comes first, whatever else keeps the job from its pods: the condition Placed of the last
    status is all that records it, so each pass must write it again.
    """
    if end or job.spec.suspend:
        return None
    host = kueue.host(job.observed.workload)
    need = replace(job.parsed.need_with(admission.additions), host=host)
    if pause_s := evictions.pause_left_s(job.evictions, job.previous, job.now):
        why, node = job.evictions.condition(job.spec.eviction_limit), job.evictions.node
        return Place(need, None, why, failed=node is not None, refused=node or None, again_after_s=pause_s)
    if job.must_stop or _is_idle(job, blocked=blocked) or not admission.granted:
        return None
    return placement.choose(
        node_fit.with_priority(need, job.observed.pod_priority_class),
        job.observed,
        snapshot,
        by_scheduler=job.spec.placement.mode == "Scheduler" and host is None,
        nodes_may_come=job.settings.nodes_may_come,
        status=job.previous,
        now=job.now,
    )


def _finished(job: JobPass, status: dict[str, Any], *, end: Condition, admission: Admission) -> Plan:
    """Return the plan for a job that has ended: its servers go at once, and a learner that was cut off with them."""
    unwanted = ("Deployment",) if learner_stays(job, end) else ("Deployment", "Job")
    patch = workload_patch(job, end=end, admission=admission, place=None)
    made = Plan(status, deletions=existing(job.observed, *unwanted), workload_patch=patch)
    return with_time_to_live(job.raw, job.observed, made, job.now)


def _next_look(
    job: JobPass,
    status: Mapping[str, Any],
    *,
    blocked: Condition | None,
    admission: Admission,
    place: Place | None,
    deletions: Sequence[str],
) -> float | None:
    """Return the seconds until the next pass, if none is caused before."""
    every_look = [
        *looks(job, status, blocked=blocked, deletions=deletions),
        place.again_after_s if place else None,
        kueue.CLASS_AGAIN_S if admission.lacks_class else None,
        binding.UNMADE_S if binding.learner_unmade_since(job.observed, job.previous) else None,
    ]
    return soonest(*every_look)
