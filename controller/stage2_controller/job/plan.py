"""The plan: from a job and what is observed of it to its children and status. Pure: no client, no clock, no randomness.

The same plan serves three executors: the controller (`plan`), static YAML (`static_children`) and local processes
(`stage2_controller.job.containers.containers`).
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from stage2_api.errors import ConfigError
from stage2_api.job import RolloutMatchingJob
from stage2_controller.job import conditions, diff, kueue, names, ownership, readiness_gate, reasons
from stage2_controller.job import outcome as outcomes
from stage2_controller.job import status as statuses
from stage2_controller.job.children import meta, secret
from stage2_controller.job.containers import containers
from stage2_controller.job.desired import Desired, children, desired, namespace_of
from stage2_controller.job.observed import Observed, terminating
from stage2_controller.job.placement import NodeView, NodeChoice, place
from stage2_controller.job.readiness_gate import GateCondition
from stage2_controller.job.settings import DEFAULT_IMAGE, Settings


@dataclass(frozen=True)
class Plan:
    """What has to be true of a job, and when to look again."""

    status: dict[str, Any]
    children: tuple[meta.Manifest, ...] = ()  # in the order of their creation
    deletions: tuple[str, ...] = ()  # kinds of children that have to go
    placement: NodeChoice | None = None  # the job's place; None: it needs none
    keeps_place: bool = False  # refused, but what already runs goes on
    workload_patch: Mapping[str, Any] | None = None  # what Kueue has to be told
    gate: GateCondition | None = None  # the readiness of the rollout pod that has to be told
    delete_job: bool = False  # spec.ttlSecondsAfterFinished has passed
    again_after_s: float | None = None


def plan(
    raw: Mapping[str, Any],
    observed: Observed,
    *,
    settings: Settings,
    now: datetime,
    new_token: Callable[[], str],
    cluster: NodeView | None = None,
    desired_of: Callable[[Mapping[str, Any]], Desired] | None = None,
) -> Plan:
    """The plan of one pass over the job `raw`, an object as the API server holds it.

    `new_token` makes the bearer token of a job that has no Secret yet. Without a `cluster` the scheduler chooses the
    node of the servers, and the learner follows them. `desired_of` gives drafts that are known already.
    """
    previous = raw.get("status") or {}
    if raw["spec"].get("managedBy", names.MANAGER) != names.MANAGER:
        return Plan(status=dict(previous))
    try:
        drafted = desired_of(raw) if desired_of else desired(raw, settings)
    except ConfigError as error:
        return _refused(raw, observed, str(error), now)
    accepted, workload, spec_hash = drafted.job, drafted.processes, drafted.spec_hash
    outcome = outcomes.outcome(accepted, [s.name for s in workload.servers], observed, status=previous, now=now)
    restarts = accepted.spec.suspend or diff.spec_changed(observed, spec_hash)
    queue = kueue.queue_name(raw)
    blocked = None if outcome else ownership.obstacle(observed)
    idle = blocked is not None and observed.deployment is None and observed.learner is None  # it claims no place
    quota = None
    if queue and not outcome and not idle:
        quota = kueue.reserved(observed.workload, queue) if settings.kueue else kueue.disabled(queue)
    admitted = quota is None or quota.status == "True"
    shaped = drafted.adding(kueue.additions(observed) if queue and admitted else {})
    placement = None
    if cluster and not outcome and not restarts and admitted and not idle:
        placement = place(shaped.need, observed, cluster, now=now, host=kueue.host(observed.workload))
    wanted = shaped.on(placement.node if placement else None)
    situation = statuses.Situation(
        job=accepted,
        processes=workload,
        observed=observed,
        previous=previous,
        outcome=outcome,
        now=now,
        placement=placement,
        quota=quota,
        blocked=blocked,
    )
    answer = kueue.answer(observed.workload, observed, outcome, at=conditions.timestamp(now)) if queue else None
    status = statuses.accepted(situation)
    if outcome:
        return replace(_finished(accepted, observed, status, now), workload_patch=answer)
    staged, deletions = _stage(observed, wanted, situation, restarts=restarts)
    if queue and settings.kueue:
        asked_for = kueue.workload(
            raw["metadata"],
            drafted.children,
            queue=queue,
            active=not accepted.spec.suspend,
            priority_class=cluster.priority_class if cluster else None,
        )
        staged = (*(staged if admitted else ()), meta.stamped(asked_for, spec_hash))
    if staged and observed.secret is None and admitted:
        staged = (secret.secret(raw["metadata"], new_token()), *staged)
    return Plan(
        status=status,
        children=() if blocked else staged,
        deletions=deletions,
        placement=placement,
        workload_patch=answer,
        gate=readiness_gate.gate(observed, status),
        again_after_s=_next_look(situation, status, settings),
    )


def static_children(
    accepted: RolloutMatchingJob, *, namespace: str | None = None, image: str = DEFAULT_IMAGE, token: str | None = None
) -> list[meta.Manifest]:
    """All children of a job as static YAML, without an owner: apply them where no controller runs. Raises ConfigError.

    The learner then waits for its servers by itself. Without `token` the Secret gets a fresh one.
    """
    owner = {"name": accepted.metadata.name, "namespace": namespace or namespace_of(accepted)}
    host = names.service_host(owner["name"], owner["namespace"])
    workload = containers(accepted, host_for=lambda _: host)
    return [
        secret.secret(owner, token or secrets.token_urlsafe(32)),
        *children(accepted, owner, workload, Settings(image=image)),
    ]


def _stage(
    observed: Observed, wanted: tuple[meta.Manifest, ...], situation: statuses.Situation, *, restarts: bool
) -> tuple[tuple[meta.Manifest, ...], tuple[str, ...]]:
    """The children that may exist now, and the kinds that must not.

    A job that has no place has no children. A running job whose spec changed was suspended, edited and resumed faster
    than this pass came: it starts anew. Where nobody serves the job's queue nothing starts, and what runs goes on.
    """
    if restarts:
        return _without(wanted, "Deployment", "Job"), _existing(observed, "Job", "Deployment")
    if situation.quota and situation.quota.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if (situation.placement and situation.placement.node is None) or (
        situation.quota and situation.quota.status != "True"
    ):
        return (), _existing(observed, "Job", "Deployment")
    servers = situation.server_names
    waits = observed.old_learner() or (
        servers and observed.learner is None and statuses.rollout_finding(observed, servers)
    )
    return (_without(wanted, "Job") if waits else wanted), ()


def _refused(raw: Mapping[str, Any], observed: Observed, message: str, now: datetime) -> Plan:
    """A spec that breaks a rule: nothing is created, and what already runs goes on."""
    previous = raw.get("status") or {}
    status = statuses.refused(
        previous,
        message=message,
        started=observed.learner is not None or observed.deployment is not None or outcomes.final(previous) is not None,
        generation=raw["metadata"].get("generation", 0),
        now=now,
    )
    return Plan(status=status, keeps_place=True)


def _finished(accepted: RolloutMatchingJob, observed: Observed, status: dict[str, Any], now: datetime) -> Plan:
    """A job that has ended holds no GPU: its servers go at once, and a learner that was cut off goes with them."""
    ended_by_itself = any(
        item["type"] in ("Complete", "Failed") and item["status"] == "True"
        for item in (observed.learner or {}).get("status", {}).get("conditions", [])
    )
    deletions = _existing(observed, "Deployment", *(() if ended_by_itself else ("Job",)))
    ttl = accepted.spec.ttl_seconds_after_finished
    if ttl is None:
        return Plan(status=status, deletions=deletions)
    left = (conditions.instant(status["completionTime"]) + timedelta(seconds=ttl) - now).total_seconds()
    return Plan(
        status=status, deletions=deletions, delete_job=left <= 0, again_after_s=max(left, 0.0) if left > 0 else None
    )


def _next_look(situation: statuses.Situation, status: Mapping[str, Any], settings: Settings) -> float | None:
    looks = [
        settings.progress_s if status["phase"] == reasons.RUNNING else None,
        outcomes.seconds_left(situation.job, status, situation.now),
        outcomes.seconds_to_start(situation.job, situation.observed, status, situation.now),
        situation.placement.again_after_s if situation.placement else None,
        ownership.LOOK_AGAIN_S[situation.blocked.reason] if situation.blocked else None,
    ]
    return min((max(seconds, 0.0) for seconds in looks if seconds is not None), default=None)


def _existing(observed: Observed, *kinds: str) -> tuple[str, ...]:
    return tuple(kind for kind in kinds if (there := observed.child(kind)) is not None and not terminating(there))


def _without(manifests: tuple[meta.Manifest, ...], *kinds: str) -> tuple[meta.Manifest, ...]:
    return tuple(manifest for manifest in manifests if manifest["kind"] not in kinds)
