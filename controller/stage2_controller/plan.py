"""The plan: from a job and what is observed of it to its children and status. Pure: no client, no clock, no randomness.

The same desired state serves three executors: the controller (`plan`), static YAML (`children.build.static_children`)
and local processes (`stage2_controller.spec.containers`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_api.errors import ConfigError
from stage2_controller import conditions, outcome, reasons
from stage2_controller.children import comparison, manifest, network, pods
from stage2_controller.children.build import ParsedJob, parse
from stage2_controller.children.manifest import Manifest
from stage2_controller.children.pods import GateCondition, gate
from stage2_controller.observed import Observed
from stage2_controller.place import binding, node_fit, placement
from stage2_controller.place.capacity import Snapshot
from stage2_controller.place.placement import Place
from stage2_controller.queue import kueue, workload
from stage2_controller.queue.workload import WorkloadInputs, build_workload, pod_sets
from stage2_controller.report import status as statuses
from stage2_controller.situation import Situation
from stage2_controller.spec import names
from stage2_controller.spec.credentials import Hosts
from stage2_controller.spec.settings import Settings
from stage2_controller.stage import Manifests, additions, existing, stage

NewCredentials = Callable[[Hosts, datetime], Mapping[str, str]]


@dataclass(frozen=True)
class Plan:
    """The plan of one pass: what has to be true of a job, and when to look again."""

    status: dict[str, Any]
    children: Manifests = ()  # in the order of their creation
    deletions: tuple[str, ...] = ()  # kinds of children that have to go
    placement: Place | None = None  # the job's place; None: it needs none
    keeps_place: bool = False  # refused, but what already runs goes on
    workload_patch: Mapping[str, Any] | None = None  # what Kueue has to be told
    slices: Manifests = ()  # what has to be written of the addresses behind the Service
    gate: GateCondition | None = None  # the readiness of the rollout pod that has to be told
    delete_job: bool = False  # spec.ttlSecondsAfterFinished has passed
    again_after_s: float | None = None


def plan(
    raw: Mapping[str, Any],
    observed: Observed,
    *,
    settings: Settings,
    now: datetime,
    new_credentials: NewCredentials,
    nodes: Snapshot | None = None,
    parse_cached: Callable[[Mapping[str, Any]], ParsedJob] | None = None,
) -> Plan:
    """Return the plan of one pass over the job `raw`, an object as the API server holds it.

    `new_credentials` makes the content of the Secret of a job that has none yet. Without `nodes` the scheduler chooses
    the node of the servers, and the learner follows them. `parse_cached` gives jobs that are parsed already.
    """
    if raw["spec"].get("managedBy", names.MANAGER) != names.MANAGER:
        return Plan(status=dict(raw.get("status") or {}))
    try:
        parsed = parse_cached(raw) if parse_cached else parse(raw, settings)
    except ConfigError as error:
        return _refused(raw, observed, error.within(conditions.MESSAGE_CHARS), now)
    situation = Situation(
        raw=_forgiven(raw, parsed.spec_hash), parsed=parsed, observed=observed, settings=settings, now=now
    )
    situation = _ended(situation)
    situation = _blocked(situation)
    situation = _queued(situation)
    situation = _placed(situation, nodes)
    status = statuses.accepted(situation)
    if situation.outcome:
        return _finished(situation, status)
    return _going_on(situation, status, nodes=nodes, new_credentials=new_credentials)


def _forgiven(raw: Mapping[str, Any], spec_hash: str) -> Mapping[str, Any]:
    """Return the job without the status of a failure if its spec was corrected since: it begins anew."""
    status = raw.get("status") or {}
    edited = status.get("observedGeneration") != raw["metadata"].get("generation")
    corrected = edited and status.get("specHash", spec_hash) != spec_hash
    return {**raw, "status": {}} if corrected and status.get("phase") == reasons.FAILED else raw


def _ended(situation: Situation) -> Situation:
    """Find out whether the job has ended; a failure of pods that were made from another spec is none of this one's."""
    ended = outcome.outcome(
        situation.job,
        situation.server_names,
        situation.observed,
        spec_hash=situation.parsed.spec_hash,
        status=situation.previous,
        now=situation.now,
    )
    told_before = outcome.final(situation.previous)
    if ended and ended.phase == reasons.FAILED and situation.spec_changed and not told_before:
        ended = None
    return replace(situation, outcome=ended)


def _blocked(situation: Situation) -> Situation:
    """Find out whether objects of others keep the job's children from being written."""
    return situation if situation.outcome else replace(situation, blocked=comparison.obstacle(situation.observed))


def _queued(situation: Situation) -> Situation:
    """Find out whether Kueue has admitted a job that names a queue."""
    if situation.queue is None or situation.outcome or situation.idle:
        return situation
    if not situation.settings.kueue:
        return replace(situation, quota=kueue.disabled(situation.queue))
    if kueue.finished(situation.observed.workload) or situation.asked_before:
        return replace(situation, quota=kueue.asked_anew(situation.queue))
    if unknown := kueue.without_class(situation.raw, situation.observed):
        return replace(situation, quota=unknown)
    found = situation.observed.workload
    if found and situation.is_held and not kueue.admitted(found) and not kueue.turned_away(found):
        return replace(situation, quota=kueue.inactive(found, situation.queue))
    before = conditions.find(situation.previous, reasons.QUOTA_RESERVED)
    return replace(situation, quota=kueue.reserved(situation.observed, situation.queue, before))


def _placed(situation: Situation, nodes: Snapshot | None) -> Situation:
    """Find the node of a job that is to run, or see to it that the scheduler finds one for all of it."""
    if situation.outcome or situation.must_stop or situation.idle or not situation.admitted:
        return situation
    observed, host = situation.observed, kueue.host(situation.observed.workload)
    need = replace(situation.parsed.need_with(additions(situation)), host=host)
    place = placement.choose(
        node_fit.with_priority(need, observed.pod_priority_class),
        observed,
        nodes,
        by_scheduler=situation.job.spec.placement.mode == "Scheduler" and host is None,
        nodes_may_come=situation.settings.nodes_may_come,
        status=situation.previous,
        now=situation.now,
    )
    return replace(situation, placement=place)


def _refused(raw: Mapping[str, Any], observed: Observed, message: str, now: datetime) -> Plan:
    """Plan for a spec that breaks a rule: nothing is created, and what already runs goes on to its end."""
    previous = raw.get("status") or {}
    started = observed.learner is not None or observed.deployment is not None or outcome.final(previous) is not None
    generation = raw["metadata"].get("generation", 0)
    ended = None if outcome.final(previous) else outcome.of_learner(observed)
    status = statuses.refused(previous, message=message, started=started, ended=ended, generation=generation, now=now)
    if ended:  # whatever the spec says by now, its servers are of no use any more
        told = workload.status_patch(observed.workload, observed, ended, at=conditions.timestamp(now))
        return Plan(status=status, deletions=existing(observed, "Deployment"), workload_patch=told)
    return Plan(status=status, keeps_place=True, slices=network.slices_to_write(observed))


def _finished(situation: Situation, status: dict[str, Any]) -> Plan:
    """Plan for a job that has ended: its servers go at once, and a learner that was cut off goes with them."""
    kinds = ("Deployment",) if situation.observed.learner_ended() else ("Deployment", "Job")
    made = Plan(status=status, deletions=existing(situation.observed, *kinds), workload_patch=_told_to_kueue(situation))
    ttl = situation.job.spec.ttl_seconds_after_finished
    if ttl is None:
        return made
    left = conditions.seconds_left(conditions.instant(status["completionTime"]), ttl, situation.now)
    return replace(made, delete_job=left <= 0, again_after_s=left if left > 0 else None)


def _going_on(
    situation: Situation,
    status: dict[str, Any],
    *,
    nodes: Snapshot | None,
    new_credentials: NewCredentials,
) -> Plan:
    """Plan for a job that goes on: its children as far as they may exist now."""
    children, deletions = stage(situation)
    if children and situation.observed.secret is None and situation.admitted:
        children = (_new_secret(situation, new_credentials), *children)
    if situation.asks_anew or kueue.left_behind(situation.raw, situation.observed.workload):
        deletions = (*deletions, *existing(situation.observed, "Workload"))
    else:
        children = _with_workload(children, situation, nodes)
    if situation.renews_secret and _has_no_pods(situation.observed):
        deletions = (*deletions, *existing(situation.observed, "Secret"))
    if not situation.blocked and network.must_be_replaced(children, situation.observed):
        deletions = (*deletions, "Service")
        children = tuple(child for child in children if child["kind"] != "Service")
    return Plan(
        status=status,
        children=() if situation.blocked else children,
        deletions=deletions,
        placement=situation.placement,
        workload_patch=_told_to_kueue(situation),
        slices=network.slices_to_write(situation.observed),
        gate=gate(situation.observed, status),
        again_after_s=0.0 if {"Secret", "Service"} & set(deletions) else _next_look(situation, status),
    )


def _new_secret(situation: Situation, new_credentials: NewCredentials) -> Manifest:
    owner = situation.parsed.owner
    hosts = names.certificate_hosts(owner.name, owner.namespace) if situation.job.spec.tls.enabled else {}
    return manifest.secret(owner, new_credentials(hosts, situation.now))


def _has_no_pods(observed: Observed) -> bool:
    return not observed.pods and observed.deployment is None and observed.learner is None


def _with_workload(children: Manifests, situation: Situation, nodes: Snapshot | None) -> Manifests:
    """Return the children with the Workload of a job that names a queue; before it is admitted, that alone.

    Without `nodes` nothing would tie its pods to a host that Kueue chose.
    """
    if situation.queue is None or not situation.settings.kueue or situation.lacks_class:
        return children
    active = not (situation.job.spec.suspend or situation.returns_quota or situation.is_held)
    found, parsed = situation.observed.workload, situation.parsed
    wanted, spec_hash = kueue.reserved_pod_sets(found), kueue.asked_for(found, parsed.spec_hash)
    if wanted is None:
        one_host = nodes is not None and situation.job.spec.placement.mode == "Reserve"
        wanted, spec_hash = pod_sets(pods.templates(parsed.pod_inputs()), one_host=one_host), parsed.spec_hash
    inputs = WorkloadInputs(
        pod_sets=wanted,
        queue=kueue.queue_of(found, situation.queue),
        active=active,
        priority=kueue.priority(situation.observed, situation.observed.pod_priority_class),
        deactivated=kueue.deactivated_mark(found, by_us=not (active or situation.is_held)),
        spec_hash=spec_hash,
    )
    return (*(children if situation.admitted else ()), build_workload(parsed.owner, inputs))


def _told_to_kueue(situation: Situation) -> dict[str, Any] | None:
    if situation.queue is None:
        return None
    at = conditions.timestamp(situation.now)
    return workload.status_patch(situation.observed.workload, situation.observed, situation.outcome, at=at)


def _learner_look(situation: Situation) -> float | None:
    """Return the seconds until events may say why the learner's Job has no pod; they are no object that is watched."""
    since = binding.learner_unmade_since(situation.observed, situation.previous)
    left = conditions.seconds_left(since, binding.UNMADE_S, situation.now) if since else None
    return left if left is None or left > 0 else binding.UNMADE_S


def _next_look(situation: Situation, status: Mapping[str, Any]) -> float | None:
    looks = [
        situation.settings.progress_s if status["phase"] == reasons.RUNNING else None,
        outcome.seconds_left(situation.job, status, situation.now),
        outcome.seconds_to_start(situation.job, situation.observed, status, situation.now),
        situation.placement.again_after_s if situation.placement else None,
        comparison.LOOK_AGAIN_S[situation.blocked.reason] if situation.blocked else None,
        kueue.CLASS_AGAIN_S if situation.lacks_class else None,
        _learner_look(situation),
    ]
    return min((max(seconds, 0.0) for seconds in looks if seconds is not None), default=None)
