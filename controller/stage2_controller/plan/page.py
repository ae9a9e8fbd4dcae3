"""The plan of one pass: from a job and what is observed of it to its place, its children and its status.

Pure: no client, no clock, no randomness. `plan` has the steps in order. Static YAML (`children.build.static_children`)
and local processes (`job.containers`) use the same builders of children.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_api.errors import ConfigError
from stage2_controller.children import comparison, manifest, pods
from stage2_controller.children.build import Additions, ParsedJob, build
from stage2_controller.children.jobset import scaled
from stage2_controller.children.manifest import Manifest
from stage2_controller.children.pods import Control
from stage2_controller.job import kinds, names
from stage2_controller.job.credentials import Hosts
from stage2_controller.job.settings import Settings
from stage2_controller.place import binding, node_fit, placement
from stage2_controller.place.capacity import Snapshot
from stage2_controller.place.placement import Place
from stage2_controller.plan import evictions, outcome
from stage2_controller.plan import status as statuses
from stage2_controller.plan.job_pass import JobPass, job_pass
from stage2_controller.queue import kueue, workload
from stage2_controller.queue.workload import build_workload, pod_sets
from stage2_controller.state import conditions, ending, jobset, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import FILES_AGAIN_S, Observed, ended, terminating

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

    # 4. A JobSet places and queues its own pods: it is all that is left to decide.
    if job.parsed.of_jobset:
        return _plan_of_jobset(job, end=end, blocked=blocked, new_credentials=new_credentials)

    # 5. Does it have quota?
    admission = _admit(job, end=end, blocked=blocked)

    # 6. Where does it run?
    place = _choose_place(job, snapshot, end=end, blocked=blocked, admission=admission)

    # 7. What do people see?
    status = statuses.valid_status(job, end=end, blocked=blocked, quota=admission.condition, place=place)
    if end:
        return _finished(job, status, end=end, admission=admission)

    # 8. Which children exist, which go, and when is the next look?
    children, deletions = _children(
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
        workload_patch=_workload_patch(job, end=end, admission=admission, place=place),
        again_after_s=_next_look(job, status, blocked=blocked, admission=admission, place=place, deletions=deletions),
    )


@dataclass(frozen=True)
class Admission:
    """Whether the job has quota. One exists only once that question was put."""

    condition: Condition | None  # QuotaReserved; None: the job needs no quota
    additions: Additions  # what Kueue's admission adds to the pods

    @property
    def granted(self) -> bool:
        """Whether no quota is missing."""
        return self.condition is None or self.condition.status == "True"

    @property
    def lacks_class(self) -> bool:
        """Whether the job names a WorkloadPriorityClass that does not exist."""
        return self.condition is not None and self.condition.reason == reasons.NO_PRIORITY_CLASS


def _invalid(raw: Mapping[str, Any], observed: Observed, refused: ConfigError, now: datetime) -> Plan:
    """Return the plan for an invalid spec: no child is written.

    Children that stand, of a spec before, stay, unless the job is suspended: for that nothing has to be built.
    """
    message = refused.within(conditions.MESSAGE_CHARS)
    final = outcome.final(raw.get("status") or {})
    suspended = raw["spec"].get("suspend") is True and not final
    if observed.learner or observed.deployment or observed.jobset or final:
        status = statuses.unplanned(raw, Condition(reasons.ACCEPTED, "False", reasons.INVALID_SPEC, message), now)
    else:
        status = statuses.invalid_status(raw, message, now)
    deletions = existing(observed, "Job", "Deployment", names.JOBSET) if suspended else ()
    return _with_time_to_live(raw, observed, Plan(status=status, deletions=deletions, keeps_place=True), now)


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

    The pause after an eviction goes on whatever else keeps the job from its pods: it is known by its condition alone.
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
    unwanted = ("Deployment",) if _learner_stays(job, end) else ("Deployment", "Job")
    patch = _workload_patch(job, end=end, admission=admission, place=None)
    made = Plan(status, deletions=existing(job.observed, *unwanted), workload_patch=patch)
    return _with_time_to_live(job.raw, job.observed, made, job.now)


def _learner_stays(job: JobPass, end: Condition) -> bool:
    """Return whether the learner ended by itself: its Job stays, for its log."""
    return end.type == reasons.SUCCEEDED or job.observed.learner_ended()


def _with_time_to_live(raw: Mapping[str, Any], observed: Observed, made: Plan, now: datetime) -> Plan:
    """Return the plan of a job that has ended, or is refused: the job is deleted once its time has passed."""
    ttl, failed = raw["spec"].get("ttlSecondsAfterFinished"), conditions.find(made.status, reasons.FAILED) or {}
    ended_at: str | None = made.status.get("completionTime") or failed.get("lastTransitionTime")
    late_s = ending.seconds_to_next_overdue(observed, now)
    if type(ttl) is not int or ttl < 0 or ended_at is None:
        return replace(made, again_after_s=late_s)
    left_s = conditions.seconds_left(conditions.instant(ended_at), ttl, now)
    return replace(made, delete_job=left_s <= 0, again_after_s=_soonest(left_s, late_s) if left_s > 0 else None)


def _plan_of_jobset(
    job: JobPass, *, end: Condition | None, blocked: Condition | None, new_credentials: NewCredentials
) -> Plan:
    """Return the plan of a job whose pods a JobSet has: it is created and deleted, and nothing else.

    JobSet ends the servers of a learner that has ended. A new JobSet waits for all pods of the one before, because two
    learners would write the same checkpoints.
    """
    observed, parsed = job.observed, job.parsed
    status = statuses.valid_status(job, end=end, blocked=blocked, quota=job.quota_of_jobset, place=None)
    if end:
        unwanted = () if _learner_stays(job, end) else (names.JOBSET,)
        made = Plan(status, deletions=existing(observed, *unwanted))
        return _with_time_to_live(job.raw, observed, made, job.now)
    taken = blocked and blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed)
    stop = bool(taken) or job.must_stop
    control = Control(job_uid=str(parsed.owner.uid), spec_hash=parsed.spec_hash)
    children = () if taken else build(parsed, job.settings, control=control)
    if stop or (observed.jobset is None and not all(map(ended, observed.pods))):
        children = _without(children, names.JOBSET)
    if children and observed.secret is None and not job.holds_secret:
        children = (_new_secret(job, new_credentials), *children)
    unwanted = (*((names.JOBSET,) if stop else ()), *(("Secret",) if _secret_goes(job) else ()))
    deletions = existing(observed, *unwanted)
    looks = (*_looks(job, status, blocked=blocked, deletions=deletions), jobset.looks_again_s(observed))
    return Plan(
        status=status,
        children=() if blocked else children,
        scaled=None if stop or blocked else scaled(parsed.owner, parsed.job, observed),
        deletions=deletions,
        again_after_s=_soonest(*looks),
    )


def _secret_goes(job: JobPass) -> bool:
    return job.renews_secret and not job.holds_secret


def _children(
    job: JobPass,
    *,
    blocked: Condition | None,
    admission: Admission,
    place: Place | None,
    new_credentials: NewCredentials,
    one_host: bool,
) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    one_host: the controller can tie pods to a node, so Kueue may be asked for a single host.
    """
    observed = job.observed
    children, deletions = _children_of_job(job, blocked=blocked, admission=admission, place=place)
    if children and observed.secret is None and admission.granted and not job.holds_secret:
        children = (_new_secret(job, new_credentials), *children)
    needs_new_one = _needs_new_workload(job, admission=admission, place=place)
    if needs_new_one or kueue.is_abandoned(job.raw, observed.workload):
        deletions += existing(observed, "Workload")
    elif job.queue is not None and job.settings.kueue and not admission.lacks_class:
        # Before Kueue admits the job, its Workload is all that exists.
        children = (*(children if admission.granted else ()), _workload(job, job.queue, one_host=one_host))
    if _secret_goes(job):
        deletions += existing(observed, "Secret")
    return () if blocked else children, deletions


def _children_of_job(
    job: JobPass, *, blocked: Condition | None, admission: Admission, place: Place | None
) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children besides Secret and Workload that may exist now, and the kinds that must not.

    A job that waits for a node has no children. Then it gets servers and learner in one pass, so that together their
    pods hold all of its room; a learner waits only for the end of an old one. A running job whose spec changed was
    suspended, edited and resumed between two passes: it starts again. If the controller runs without Kueue, nothing
    starts, and what runs continues. While a foreign object has a child's name, only a learner that has begun continues:
    others might wait for ever.
    """
    observed, both = job.observed, existing(job.observed, "Job", "Deployment")
    if blocked and blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed):
        return (), both
    if job.must_stop:
        return _without(_build(job, admission=admission, place=place), *kinds.ROLE_OF_PODS), both
    if admission.condition and admission.condition.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if _waits_for_node(job, place=place) or not admission.granted:
        return (), both
    servers_end = observed.deployment is None and _servers_end(job, place=place)
    waiting = {"Job": observed.old_learner(), "Deployment": servers_end}
    unwanted = (kind for kind, waits in waiting.items() if waits)
    return _without(_build(job, admission=admission, place=place), *unwanted), ()


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the kinds of which a child exists that nobody has deleted yet."""
    return tuple(kind for kind in wanted if (child := observed.child(kind)) is not None and not terminating(child))


def _build(job: JobPass, *, admission: Admission, place: Place | None) -> Manifests:
    parsed = job.parsed
    control = Control(
        job_uid=str(parsed.owner.uid),
        spec_hash=parsed.spec_hash,
        attempt=_attempt(job, place=place),
        node=place.node if place and place.tied else None,
        avoid=place.avoid if place else (),
        avoid_if_possible=place.avoid_if_possible if place else (),
    )
    return build(parsed, job.settings, additions=admission.additions, control=control)


def _attempt(job: JobPass, *, place: Place | None) -> str | None:
    """Return the label of the servers' pods: that of those which stand (older controllers wrote none), or the next."""
    deployment = job.observed.deployment
    if deployment is not None and not terminating(deployment):
        label: str | None = deployment["spec"]["template"]["metadata"]["labels"].get(names.LABEL_ATTEMPT)
        return label
    return manifest.digest([job.parsed.owner.uid, job.parsed.spec_hash, place.node if place else None])


def _servers_end(job: JobPass, *, place: Place | None) -> bool:
    """Return whether servers of the last attempt still end on the same node: they would answer for the next ones."""
    leaving = [pod for pod in job.observed.pods if terminating(pod) and not ended(pod)]
    bound = [pod for pod in leaving if pod["spec"].get("nodeName") and not ending.overdue(pod, job.now)]
    return any(pod["metadata"]["labels"].get(names.LABEL_ATTEMPT) == _attempt(job, place=place) for pod in bound)


def _waits_for_node(job: JobPass, *, place: Place | None) -> bool:
    """Return whether no child may exist yet: there is no node, or waiting pods are to be tied to another one.

    A place without a node that is not tied is no reason: the scheduler finds the node.
    """
    observed = job.observed
    if place is None or not place.tied:
        return False
    bound = any(pod["spec"].get("nodeName") for pod in observed.pods)
    waits_untied = bool(placement.standing(observed)) and placement.tied_to(observed) is None and not bound
    return place.node is None or waits_untied


def _without(manifests: Manifests, *unwanted: str) -> Manifests:
    return tuple(one for one in manifests if one["kind"] not in unwanted)


def _new_secret(job: JobPass, new_credentials: NewCredentials) -> Manifest:
    owner, spec = job.parsed.owner, job.spec
    hosts = names.certificate_hosts(owner.name, owner.namespace, engine=spec.engine) if spec.tls.enabled else {}
    return manifest.secret(owner, new_credentials(hosts, job.now))


def _workload(job: JobPass, queue: str, *, one_host: bool) -> Manifest:
    """Return the Workload of a job that names a queue. A Workload that holds quota keeps its pod sets."""
    found, parsed = job.observed.workload, job.parsed
    wanted, spec_hash = kueue.reserved_pod_sets(found), kueue.spec_hash_of(found, parsed.spec_hash)
    if wanted is None:
        one_host = one_host and job.spec.placement.mode == "Reserve"
        wanted, spec_hash = pod_sets(pods.templates(parsed.pod_inputs()), one_host=one_host), parsed.spec_hash
    priority = kueue.priority(job.observed, job.observed.pod_priority_class)
    return build_workload(parsed.owner, wanted, kueue.queue_of(found, queue), priority=priority, spec_hash=spec_hash)


def _needs_new_workload(job: JobPass, *, admission: Admission, place: Place | None) -> bool:
    """Return whether the job's Workload must be deleted, once it covers no pod any more.

    It belongs to an earlier run or spec, the job is suspended, or the assigned host has no room: Kueue looks for
    another host only for a new Workload.
    """
    found = job.observed.workload
    nowhere = place is not None and (place.waits or place.failed)
    host_of_no_use = admission.granted and nowhere and kueue.host_overdue(found, job.now)
    outdated = job.spec.suspend or host_of_no_use or job.has_old_workload
    return kueue.finished(found) or (outdated and all(map(ended, job.observed.pods)))


def _workload_patch(
    job: JobPass, *, end: Condition | None, admission: Admission, place: Place | None
) -> dict[str, Any] | None:
    if job.queue is None or _needs_new_workload(job, admission=admission, place=place):
        return None
    return workload.status_patch(job.observed.workload, job.observed, end=end, at=conditions.timestamp(job.now))


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
    looks = [
        *_looks(job, status, blocked=blocked, deletions=deletions),
        place.again_after_s if place else None,
        kueue.CLASS_AGAIN_S if admission.lacks_class else None,
        binding.UNMADE_S if binding.learner_unmade_since(job.observed, job.previous) else None,
    ]
    return _soonest(*looks)


def _looks(
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


def _soonest(*looks: float | None) -> float | None:
    return min((max(seconds, 0.0) for seconds in looks if seconds is not None), default=None)
