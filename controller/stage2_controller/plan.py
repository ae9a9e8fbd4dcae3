"""The plan of one pass: from a job and what is observed of it to its place, its children and its status.

Pure: no client, no clock, no randomness. `plan` has the steps in order. Static YAML (`children.build.static_children`)
and local processes (`spec.containers`) use the same builders of children.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_api.errors import ConfigError
from stage2_controller import conditions, ending, evictions, jobset, outcome, reasons
from stage2_controller.children import comparison, manifest, pods
from stage2_controller.children.build import Additions, ParsedJob, build
from stage2_controller.children.jobset import rollout_pods, scaled
from stage2_controller.children.manifest import Manifest
from stage2_controller.children.pods import Control
from stage2_controller.conditions import Condition
from stage2_controller.context import PlanContext, known_hash, seen_evictions, with_allowed_servers
from stage2_controller.observed import FILES_AGAIN_S, Observed, ended, terminating
from stage2_controller.outcome import Outcome
from stage2_controller.place import binding, node_fit, placement
from stage2_controller.place.capacity import Snapshot
from stage2_controller.place.placement import Place
from stage2_controller.queue import kueue, workload
from stage2_controller.queue.workload import build_workload, pod_sets
from stage2_controller.report import status as statuses
from stage2_controller.spec import kinds, names
from stage2_controller.spec.credentials import Hosts
from stage2_controller.spec.settings import Settings

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
    if raw["spec"].get("managedBy", names.MANAGER) != names.MANAGER:
        return Plan(status=dict(raw.get("status") or {}))
    if isinstance(parsed, ConfigError):
        return _invalid(raw, observed, parsed.within(conditions.MESSAGE_CHARS), now)
    if isinstance(parsed, Exception):
        raise parsed  # a bug in parsing: the caller reports it
    quota, every_pod = None, observed
    if parsed.of_jobset:
        parsed, quota = with_allowed_servers(raw, parsed, observed)
        per_pod, learners = parsed.processes.per_pod, parsed.job.spec.learner.nodes
        observed = jobset.on_one_node(observed, pods=rollout_pods(parsed.job), per_pod=per_pod, learners=learners)
    parsed = replace(parsed, spec_hash=known_hash(raw, parsed, observed))
    raw = outcome.without_old_failure(raw, parsed.job, spec_hash=parsed.spec_hash)
    context = PlanContext(raw, parsed, observed, settings, now, quota=quota, evictions=seen_evictions(raw, every_pod))
    starts = not context.stands or context.spec_changed
    if parsed.refused and starts and not (context.job.spec.suspend or outcome.final(context.previous)):
        return _invalid(context.raw, observed, parsed.refused.within(conditions.MESSAGE_CHARS), now)
    # Each step reads the results of those before it, through properties of PlanContext.
    context = replace(context, outcome=_outcome(context))
    blocked = comparison.obstacle(observed, raw["metadata"]["namespace"])
    context = replace(context, blocked=None if context.outcome else blocked)
    if parsed.of_jobset:
        return _plan_of_jobset(context, new_credentials)
    context = replace(context, quota=_quota(context))
    context = replace(context, additions=_additions(context))
    context = replace(context, placement=_choose_place(context, snapshot))
    status = statuses.valid_status(context)
    if context.outcome:
        return _finished(context, status)
    children, deletions = _children(context, new_credentials, one_host=snapshot.sees_nodes)
    return Plan(
        status=status,
        children=() if context.blocked else children,
        deletions=deletions,
        placement=context.placement,
        workload_patch=_workload_patch(context),
        # A Secret that is deleted now is created anew by the next pass, at once.
        again_after_s=0.0 if "Secret" in deletions else _next_look(context, status),
    )


def _invalid(raw: Mapping[str, Any], observed: Observed, message: str, now: datetime) -> Plan:
    """Return the plan for an invalid spec: no child is written.

    Children that stand, of a spec before, stay, unless the job is suspended: for that nothing has to be built.
    """
    final = outcome.final(raw.get("status") or {})
    suspended = raw["spec"].get("suspend") is True and not final
    if observed.learner or observed.deployment or observed.jobset or final:
        status = statuses.unplanned(raw, Condition(reasons.ACCEPTED, "False", reasons.INVALID_SPEC, message), now)
    else:
        status = statuses.invalid_status(raw, message, now)
    deletions = existing(observed, "Job", "Deployment", names.JOBSET) if suspended else ()
    return _with_time_to_live(raw, observed, Plan(status=status, deletions=deletions, keeps_place=True), now)


def _outcome(context: PlanContext) -> Outcome | None:
    """Return whether the job has ended, and how.

    While its learner is of another spec, no new failure counts, not even a deadline: the job is about to start again.
    """
    found = outcome.outcome(
        context.job,
        context.server_names,
        context.observed,
        spec_hash=context.parsed.spec_hash,
        status=context.previous,
        evicted=context.evictions,
        now=context.now,
    )
    if found and found.phase == reasons.FAILED and context.spec_changed and not outcome.final(context.previous):
        return None
    return found


def _quota(context: PlanContext) -> Condition | None:
    """Return whether Kueue has admitted the job; None where it names no queue, or needs no quota now."""
    queue, found = context.queue, context.observed.workload
    if queue is None or context.outcome or context.is_idle:
        return None
    if not context.settings.kueue:
        return kueue.not_served(queue)
    if kueue.finished(found) or context.has_old_workload:
        return kueue.waits_for_old_workload(queue)
    if unknown := kueue.missing_class(context.raw, context.observed):
        return unknown
    if found and kueue.inactive(found) and not kueue.admitted(found) and not kueue.turned_away(found):
        return kueue.workload_inactive(found, queue)
    return kueue.quota_reserved(context.observed, queue, conditions.find(context.previous, reasons.QUOTA_RESERVED))


def _choose_place(context: PlanContext, snapshot: Snapshot) -> Place | None:
    """Return the place of a job that is to run; None for others.

    The pause after an eviction goes on whatever else keeps the job from its pods: it is known by its condition alone.
    """
    if context.outcome or context.job.spec.suspend:
        return None
    observed, host = context.observed, kueue.host(context.observed.workload)
    need = replace(context.parsed.need_with(context.additions), host=host)
    if pause_s := evictions.pause_left_s(context.evictions, context.previous, context.now):
        why, node = context.evictions.condition(context.job.spec.eviction_limit), context.evictions.node
        return Place(need, None, why, failed=node is not None, refused=node or None, again_after_s=pause_s)
    if context.must_stop or context.is_idle or not context.admitted:
        return None
    return placement.choose(
        node_fit.with_priority(need, observed.pod_priority_class),
        observed,
        snapshot,
        by_scheduler=context.job.spec.placement.mode == "Scheduler" and host is None,
        nodes_may_come=context.settings.nodes_may_come,
        status=context.previous,
        now=context.now,
    )


def _finished(context: PlanContext, status: dict[str, Any]) -> Plan:
    """Return the plan for a job that has ended: its servers go at once, and a learner that was cut off with them."""
    unwanted = ("Deployment",) if _learner_stays(context) else ("Deployment", "Job")
    made = Plan(status, deletions=existing(context.observed, *unwanted), workload_patch=_workload_patch(context))
    return _with_time_to_live(context.raw, context.observed, made, context.now)


def _learner_stays(context: PlanContext) -> bool:
    """Return whether the learner ended by itself: its Job stays, for its log."""
    done = context.outcome is not None and context.outcome.phase == reasons.SUCCEEDED
    return done or context.observed.learner_ended()


def _with_time_to_live(raw: Mapping[str, Any], observed: Observed, made: Plan, now: datetime) -> Plan:
    """Return the plan of a job that has ended, or is refused: the job is deleted once its time has passed."""
    ttl, failed = raw["spec"].get("ttlSecondsAfterFinished"), conditions.find(made.status, reasons.FAILED) or {}
    ended_at: str | None = made.status.get("completionTime") or failed.get("lastTransitionTime")
    late_s = ending.seconds_to_next_overdue(observed, now)
    if type(ttl) is not int or ttl < 0 or ended_at is None:
        return replace(made, again_after_s=late_s)
    left_s = conditions.seconds_left(conditions.instant(ended_at), ttl, now)
    return replace(made, delete_job=left_s <= 0, again_after_s=_soonest(left_s, late_s) if left_s > 0 else None)


def _plan_of_jobset(context: PlanContext, new_credentials: NewCredentials) -> Plan:
    """Return the plan of a job whose pods a JobSet has: it is created and deleted, and nothing else.

    JobSet ends the servers of a learner that has ended. A new JobSet waits for all pods of the one before, because two
    learners would write the same checkpoints.
    """
    observed, parsed = context.observed, context.parsed
    status = statuses.valid_status(context)
    if context.outcome:
        unwanted = () if _learner_stays(context) else (names.JOBSET,)
        made = Plan(status, deletions=existing(observed, *unwanted))
        return _with_time_to_live(context.raw, observed, made, context.now)
    taken = context.blocked and context.blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed)
    stop = bool(taken) or context.must_stop
    children = () if taken else _build(context)
    if stop or (observed.jobset is None and not all(map(ended, observed.pods))):
        children = _without(children, names.JOBSET)
    if children and observed.secret is None and not context.holds_secret:
        children = (_new_secret(context, new_credentials), *children)
    unwanted = (*((names.JOBSET,) if stop else ()), *(("Secret",) if _secret_goes(context) else ()))
    deletions = existing(observed, *unwanted)
    looks = (*_looks(context, status), jobset.looks_again_s(observed))
    return Plan(
        status=status,
        children=() if context.blocked else children,
        scaled=None if stop or context.blocked else scaled(parsed.owner, parsed.job, observed),
        deletions=deletions,
        again_after_s=0.0 if "Secret" in deletions else _soonest(*looks),
    )


def _secret_goes(context: PlanContext) -> bool:
    return context.renews_secret and not context.holds_secret


def _children(
    context: PlanContext, new_credentials: NewCredentials, *, one_host: bool
) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    one_host: the controller can tie pods to a node, so Kueue may be asked for a single host.
    """
    observed = context.observed
    children, deletions = _children_of_job(context)
    if children and observed.secret is None and context.admitted and not context.holds_secret:
        children = (_new_secret(context, new_credentials), *children)
    if context.needs_new_workload or kueue.is_abandoned(context.raw, observed.workload):
        deletions += existing(observed, "Workload")
    elif context.queue is not None and context.settings.kueue and not context.lacks_class:
        # Before Kueue admits the job, its Workload is all that exists.
        children = (*(children if context.admitted else ()), _workload(context, context.queue, one_host=one_host))
    if _secret_goes(context):
        deletions += existing(observed, "Secret")
    return children, deletions


def _children_of_job(context: PlanContext) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children besides Secret and Workload that may exist now, and the kinds that must not.

    A job that waits for a node has no children. Then it gets servers and learner in one pass, so that together their
    pods hold all of its room; a learner waits only for the end of an old one. A running job whose spec changed was
    suspended, edited and resumed between two passes: it starts again. If the controller runs without Kueue, nothing
    starts, and what runs continues. While a foreign object has a child's name, only a learner that has begun continues:
    others might wait for ever.
    """
    observed, both = context.observed, existing(context.observed, "Job", "Deployment")
    if context.blocked and context.blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed):
        return (), both
    if context.must_stop:
        return _without(_build(context), *kinds.ROLE_OF_PODS), both
    if context.quota and context.quota.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if _waits_for_node(context) or not context.admitted:
        return (), both
    waiting = {"Job": observed.old_learner(), "Deployment": observed.deployment is None and _servers_end(context)}
    return _without(_build(context), *(kind for kind, waits in waiting.items() if waits)), ()


def existing(observed: Observed, *wanted: str) -> tuple[str, ...]:
    """Return those of the kinds of which a child exists that nobody has deleted yet."""
    return tuple(kind for kind in wanted if (child := observed.child(kind)) is not None and not terminating(child))


def _build(context: PlanContext) -> Manifests:
    place, parsed = context.placement, context.parsed
    control = Control(
        job_uid=str(parsed.owner.uid),
        spec_hash=parsed.spec_hash,
        attempt=None if parsed.of_jobset else _attempt(context),
        node=place.node if place and place.tied else None,
        avoid=place.avoid if place else (),
        avoid_if_possible=place.avoid_if_possible if place else (),
    )
    return build(parsed, context.settings, additions=context.additions, control=control)


def _attempt(context: PlanContext) -> str | None:
    """Return the label of the servers' pods: that of those which stand (older controllers wrote none), or the next."""
    deployment, place = context.observed.deployment, context.placement
    if deployment is not None and not terminating(deployment):
        label: str | None = deployment["spec"]["template"]["metadata"]["labels"].get(names.LABEL_ATTEMPT)
        return label
    return manifest.digest([context.parsed.owner.uid, context.parsed.spec_hash, place.node if place else None])


def _servers_end(context: PlanContext) -> bool:
    """Return whether servers of the last attempt still end on the same node: they would answer for the next ones."""
    leaving = [pod for pod in context.observed.pods if terminating(pod) and not ended(pod)]
    bound = [pod for pod in leaving if pod["spec"].get("nodeName") and not ending.overdue(pod, context.now)]
    return any(pod["metadata"]["labels"].get(names.LABEL_ATTEMPT) == _attempt(context) for pod in bound)


def _additions(context: PlanContext) -> Additions:
    """Return what Kueue's admission adds to the pods."""
    return kueue.additions(context.observed) if context.quota is not None and context.admitted else {}


def _waits_for_node(context: PlanContext) -> bool:
    """Return whether no child may exist yet: there is no node, or waiting pods are to be tied to another one.

    A place without a node that is not tied is no reason: the scheduler finds the node.
    """
    place, observed = context.placement, context.observed
    if place is None or not place.tied:
        return False
    bound = any(pod["spec"].get("nodeName") for pod in observed.pods)
    waits_untied = bool(placement.standing(observed)) and placement.tied_to(observed) is None and not bound
    return place.node is None or waits_untied


def _without(manifests: Manifests, *unwanted: str) -> Manifests:
    return tuple(one for one in manifests if one["kind"] not in unwanted)


def _new_secret(context: PlanContext, new_credentials: NewCredentials) -> Manifest:
    owner = context.parsed.owner
    spec = context.job.spec
    hosts = names.certificate_hosts(owner.name, owner.namespace, engine=spec.engine) if spec.tls.enabled else {}
    return manifest.secret(owner, new_credentials(hosts, context.now))


def _workload(context: PlanContext, queue: str, *, one_host: bool) -> Manifest:
    """Return the Workload of a job that names a queue. A Workload that holds quota keeps its pod sets."""
    found, parsed = context.observed.workload, context.parsed
    wanted, spec_hash = kueue.reserved_pod_sets(found), kueue.spec_hash_of(found, parsed.spec_hash)
    if wanted is None:
        one_host = one_host and context.job.spec.placement.mode == "Reserve"
        wanted, spec_hash = pod_sets(pods.templates(parsed.pod_inputs()), one_host=one_host), parsed.spec_hash
    priority = kueue.priority(context.observed, context.observed.pod_priority_class)
    return build_workload(parsed.owner, wanted, kueue.queue_of(found, queue), priority=priority, spec_hash=spec_hash)


def _workload_patch(context: PlanContext) -> dict[str, Any] | None:
    if context.queue is None or context.needs_new_workload:
        return None
    at = conditions.timestamp(context.now)
    return workload.status_patch(context.observed.workload, context.observed, context.outcome, at=at)


def _next_look(context: PlanContext, status: Mapping[str, Any]) -> float | None:
    """Return the seconds until the next pass, if none is caused before."""
    looks = [
        *_looks(context, status),
        context.placement.again_after_s if context.placement else None,
        kueue.CLASS_AGAIN_S if context.lacks_class else None,
        binding.UNMADE_S if binding.learner_unmade_since(context.observed, context.previous) else None,
    ]
    return _soonest(*looks)


def _looks(context: PlanContext, status: Mapping[str, Any]) -> tuple[float | None, ...]:
    """Return the seconds until each pass that both engines need."""
    return (
        context.settings.progress_s if status["phase"] == reasons.RUNNING else None,
        FILES_AGAIN_S if context.stands else None,
        ending.seconds_to_next_overdue(context.observed, context.now) if context.must_stop else None,
        outcome.seconds_left(context.job, status, context.now),
        outcome.seconds_to_start(context.job, context.observed, status, context.now),
        comparison.LOOK_AGAIN_S[context.blocked.reason] if context.blocked else None,
    )


def _soonest(*looks: float | None) -> float | None:
    return min((max(seconds, 0.0) for seconds in looks if seconds is not None), default=None)
