"""The status of a job: phase, conditions, progress, servers, reproducibility. A pure function of what is observed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from stage2_api.errors import shortened
from stage2_controller import diagnose, ending, evictions, jobset, reasons
from stage2_controller.conditions import Condition, find, merged, not_after, timestamp, truth
from stage2_controller.context import PlanContext
from stage2_controller.observed import Object, running, terminating, waits_in_its_pod
from stage2_controller.report import explanation, figures, servers
from stage2_controller.spec import authorship, names, output_folder

_BUG_CHARS = 1000  # of an exception's text
_BY_HAND = {"kubectl-patch", "kubectl-edit"}


def valid_status(context: PlanContext) -> dict[str, Any]:
    """Return the status of a job whose spec is valid."""
    report = figures.report_of(context)
    of_servers = servers.servers(context, report.now.get("sync") or {})
    status: dict[str, Any] = {
        "phase": _phase(context),
        "observedGeneration": context.job.metadata.generation or 0,
        "specHash": context.parsed.spec_hash,
        "currentHash": context.parsed.current_hash,
        "writtenHash": context.parsed.written_hash,
        "startTime": _start_time(context),
        "firstStepTime": _first_step_time(context),
        "completionTime": _before_or_now(context, "completionTime") if context.outcome else None,
        "node": _node(context),
        "servers": of_servers,
        **servers.summary(context),
        "images": _images(context),
        "restarts": _restarts(context),
        **context.evictions.status(),
        **report.status(),
    }
    found = _conditions(context, report, of_servers)
    status = {key: value for key, value in status.items() if value not in (None, "", [], {})}
    return _reported(status, found, context.raw, context.now)


def _reported(
    status: Mapping[str, Any],
    found: Sequence[Condition],
    raw: Mapping[str, Any],
    now: datetime,
    *,
    trained: bool = False,
) -> dict[str, Any]:
    """Return the status with these conditions, those that follow from them, and the same as one sentence."""
    known = [asdict(condition) for condition in found]
    link = explanation.first(explanation.chain({**raw, "status": {**status, "conditions": known}}))
    every, old = [*found, *explanation.summary(link, trained=trained)], (raw.get("status") or {}).get("conditions")
    entries = merged(old or [], every, generation=status["observedGeneration"], now=now)
    return {**status, "message": link.message, "conditions": entries}


def invalid_status(raw: Mapping[str, Any], message: str, now: datetime) -> dict[str, Any]:
    """Return the status of a job that does not run, and whose spec breaks a rule."""
    found = [
        Condition(reasons.ACCEPTED, "False", reasons.INVALID_SPEC, message),
        Condition(reasons.FAILED, "True", reasons.INVALID_SPEC, message),
    ]
    kept = {key: value for key, value in (raw.get("status") or {}).items() if key in evictions.KEPT}
    status = {"phase": reasons.FAILED, "observedGeneration": raw["metadata"].get("generation", 0), **kept}
    return _reported(status, found, raw, now)


def _phase(context: PlanContext) -> str:
    if context.outcome:
        return context.outcome.phase
    if context.job.spec.suspend:
        return reasons.SUSPENDED
    pod = context.observed.pod(names.ROLE_LEARNER)
    if running(pod, names.ROLE_LEARNER):
        return reasons.RUNNING
    return reasons.STARTING if _bound(context) else reasons.PENDING


def _start_time(context: PlanContext) -> str | None:
    """Return the start. As with batch/v1 Jobs, a resumed job starts again, and its deadline counts from there."""
    if context.job.spec.suspend and not context.outcome:
        return None
    return _before_or_now(context, "startTime")


def _first_step_time(context: PlanContext) -> str | None:
    """Return when the learner first reported an optimizer step since the start."""
    before, learner = context.previous, None if context.observed.old_learner() else context.observed.report()
    if before.get("phase") == reasons.RUNNING and before.get("step") and "firstStepTime" not in before:
        return None  # an older controller saw the first step, and did not write down when
    stepped = before.get("firstStepTime") or (learner and learner.step)
    return _before_or_now(context, "firstStepTime") if stepped and _start_time(context) else None


def _before_or_now(context: PlanContext, key: str) -> str:
    """Return the time in the last status, else the time of this pass.

    A time in the future came from a clock that was ahead, unless the cluster dated objects after it: ours is behind.
    """
    before = context.previous.get(key)
    if before and before <= context.observed.latest_date():
        return str(before)
    return not_after(before, context.now) if before else timestamp(context.now)


def _node(context: PlanContext) -> str | None:
    chosen = context.placement.node if context.placement else None
    return _bound(context) or chosen or (context.previous.get("node") if context.outcome else None)


def _bound(context: PlanContext) -> str | None:
    """Return the node of the pods that are not being deleted."""
    pods = [context.observed.pod(role) for role in (names.ROLE_LEARNER, names.ROLE_ROLLOUT)]
    nodes = [pod["spec"].get("nodeName") for pod in pods if pod and not terminating(pod)]
    return next(filter(None, nodes), None)


def _images(context: PlanContext) -> list[dict[str, str]]:
    """Return the images that the containers run, or ran where they are gone."""
    known = {item["name"]: item for item in context.previous.get("images") or []}
    for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER):
        pod = context.observed.pod(role)
        for item in pod.get("status", {}).get("containerStatuses", []) if pod else []:
            digest = item.get("imageID", "").rpartition("@")[2]
            if digest.startswith("sha256:"):
                known[item["name"]] = {"name": item["name"], "image": item["image"], "digest": digest}
    return [known[name] for name in sorted(known)]


def _restarts(context: PlanContext) -> int:
    failed: int = (context.observed.learner or {}).get("status", {}).get("failed", 0)
    learner = context.observed.report()
    before: int = context.previous.get("restarts") or 0
    return max(failed + (learner.restarts if learner else 0), before)


def _accepted(context: PlanContext) -> Condition:
    if context.parsed.refused:
        message = f"accepted earlier; a new start would be refused: {context.parsed.refused}"
        return Condition(reasons.ACCEPTED, "True", reasons.NO_LONGER_VALID, message)
    if ignored := ", ".join(context.parsed.ignored):
        message = f"ignored: {ignored}; this version does not know what a newer one or a webhook has filled in"
        return Condition(reasons.ACCEPTED, "True", reasons.KEYS_IGNORED, message)
    return Condition(reasons.ACCEPTED, "True", reasons.VALID, "the spec is valid")


def _conditions(context: PlanContext, report: figures.Report, of_servers: Sequence[servers.Server]) -> list[Condition]:
    stuck = _pods_overdue(context)
    overdue = Condition(reasons.PODS_ENDED, "False", reasons.PODS_OVERDUE, stuck) if stuck else None
    found = [one for one in (_accepted(context), context.blocked, overdue) if one]
    if context.job.spec.suspend and not context.outcome:
        return [*found, _suspended(context)]
    if context.quota:
        found.append(context.quota)
    if context.placement and context.placement.condition:
        found.append(context.placement.condition)
    if context.parsed.processes.servers:
        found.append(servers.rollout_ready(context))
    found.append(_learner_running(context))
    if silence := _silence(context):
        found.append(Condition(reasons.LEARNER_REACHABLE, "False", reasons.LEARNER_UNREACHABLE, silence))
    if context.parsed.processes.servers:
        found.append(servers.weights_in_sync(context, report.now.get("sync"), of_servers))
    if lost := figures.steps_kept(context, report):
        found.append(lost)
    if context.outcome:
        found.append(Condition(context.outcome.phase, "True", context.outcome.reason, context.outcome.message))
    return found


def _suspended(context: PlanContext) -> Condition:
    by = f"spec.suspend is true{_set_by_hand(context.raw['metadata'])}"
    if context.holds_secret or context.observed.old_learner():
        stuck = _pods_overdue(context)
        saves = ", and the learner first writes its checkpoint" if _writes_checkpoint(context) else ""
        saves = f"; {stuck}" if stuck else saves
        return Condition(reasons.SUSPENDED, "False", reasons.PODS_ENDING, f"{by}: the pods end{saves}")
    message = f"{by}: no pod exists; set it to false to {_what_resumes(context)}"
    return Condition(reasons.SUSPENDED, "True", reasons.SUSPENDED_BY_SPEC, message)


def _pods_overdue(context: PlanContext) -> str | None:
    """Return which pods of a job that has ended, or must have none, do not end; None if all do in time."""
    if not (context.outcome or context.must_stop):
        return None
    metadata = [
        (pod["metadata"], pod["spec"]["nodeName"]) for pod in ending.overdue_pods(context.observed, context.now)
    ]
    named = [
        f"pod {one['name']} on node {node} has not ended and keeps what it has; a finalizer holds it, or its node is"
        f" silent: kubectl describe pod {one['name']} -n {one['namespace']}"
        for one, node in metadata
    ]
    return "; ".join(named) or None


def _what_resumes(context: PlanContext) -> str:
    """Return what follows once the job is resumed."""
    reached = figures.furthest_step(context)
    if not reached:
        return "start"
    if where := output_folder.fleeting(context.job):
        return f"start again at step 0: {where}, and with it what a learner had done to step {reached}"
    return f"resume from the last checkpoint (a learner had done step {reached})"


def _writes_checkpoint(context: PlanContext) -> bool:
    """Return whether a learner of the job runs, and what it writes as it ends will be there afterwards."""
    learner = context.observed.pod(names.ROLE_LEARNER)
    return running(learner, names.ROLE_LEARNER) and output_folder.fleeting(context.job) is None


def _set_by_hand(metadata: Mapping[str, Any]) -> str:
    """Return who set spec.suspend where no applied file has it; no apply of a file takes back what was set by hand."""
    owners = {
        item["manager"]: item["operation"]
        for item in metadata.get("managedFields") or []
        if "f:suspend" in item.get("fieldsV1", {}).get("f:spec", {})
    }
    in_file = '"suspend":true' in (metadata.get("annotations") or {}).get(authorship.LAST_APPLIED, "")
    if not owners or in_file or "Apply" in owners.values():
        return ""
    stays = "; a file that is applied without it leaves it so" if _BY_HAND & owners.keys() else ""
    return f" (set by {', '.join(owners)}{stays})"


def _learner_running(context: PlanContext) -> Condition:
    def condition(status: bool, reason: str, message: str) -> Condition:
        return Condition(reasons.LEARNER_RUNNING, truth(status), reason, message)

    if context.outcome:
        return condition(False, reasons.LEARNER_FINISHED, context.outcome.message)
    if context.renews_secret:
        message = "certificates of the job expire soon, or its Secret is gone: its pods restart with new ones"
        return condition(False, reasons.SECRET_RENEWED, message)
    if old := context.observed.old_learner():
        return condition(False, reasons.OLD_LEARNER_ENDING, _how_it_ends(old, context))
    pod = context.observed.pod(names.ROLE_LEARNER)
    if waits_in_its_pod(pod):
        return condition(False, reasons.WAITING_FOR_SERVERS, "the learner starts once all servers answer")
    finding = diagnose.learner(pod, context.observed.learner_refused)
    finding = servers.lost_labels(context, names.ROLE_LEARNER, reasons.LEARNER_RUNNING) or finding
    if finding is None:
        return condition(True, reasons.LEARNER_STARTED, _doing(context))
    if finding.reason == reasons.SERVER_CRASHED:
        limit = context.job.spec.learner.backoff_limit
        return condition(False, reasons.LEARNER_RETRYING, f"{finding.message}; at most {limit} retries")
    return condition(False, finding.reason, finding.message)


def _silence(context: PlanContext) -> str | None:
    """Return why the learner gives no report. A controller that has just started goes by what the last one wrote."""
    observed, before = context.observed, find(context.previous, reasons.LEARNER_REACHABLE)
    pod = observed.pod(names.ROLE_LEARNER)
    if context.outcome or observed.progress or terminating(pod) or not running(pod, names.ROLE_LEARNER):
        return None
    if observed.unreachable:
        return f"the learner runs and its report cannot be read: {observed.unreachable}"
    return before["message"] if before and figures.is_of_last_pod(context) else None


def _how_it_ends(old: Object, context: PlanContext) -> str:
    if old not in context.observed.orphans:
        saves = "first writes its checkpoint and ends" if _writes_checkpoint(context) else "ends"
        return f"the old learner {saves}"
    return diagnose.outlived(old)


def _doing(context: PlanContext) -> str:
    """Return what a learner that runs does, by its last report."""
    report, before = context.observed.progress, find(context.previous, reasons.LEARNER_RUNNING)
    if report:
        return f"the learner runs: {report.message or report.phase}"
    last = before and before["status"] == "True" and figures.is_of_last_pod(context)
    return before["message"] if before and last else "the learner runs"


def with_children_applied(
    status: Mapping[str, Any], job: Mapping[str, Any], refusals: Sequence[str], *, now: datetime
) -> dict[str, Any]:
    """Return the status with the condition ChildrenApplied: what was refused may be why the job does not train."""
    if refusals:
        missing = any(jobset.INSTALL in refusal for refusal in refusals)
        reason = reasons.JOBSET_MISSING if missing else reasons.CHILD_REFUSED
        applied = Condition(reasons.CHILDREN_APPLIED, "False", reason, "; ".join(refusals))
    else:
        applied = Condition(reasons.CHILDREN_APPLIED, "True", reasons.APPLIED, "the API server accepted every child")
    first, *others = [
        Condition(*(item[key] for key in ("type", "status", "reason", "message")))
        for item in status["conditions"]
        if item["type"] not in (reasons.CHILDREN_APPLIED, *explanation.SUMMARY)
    ]
    return _reported(status, [first, applied, *others], job, now)


def after_bug(raw: Mapping[str, Any], error: Exception, now: datetime) -> dict[str, Any]:
    """Return the status after a pass that met a bug."""
    message = f"{shortened(error, _BUG_CHARS)}; this is a bug of the controller, report it with the spec"
    return unplanned(raw, Condition(reasons.ACCEPTED, "Unknown", reasons.INTERNAL_ERROR, message), now)


def unplanned(raw: Mapping[str, Any], accepted: Condition, now: datetime) -> dict[str, Any]:
    """Return the status of a job that cannot be planned: as it was, but for the condition Accepted."""
    previous = raw.get("status") or {}
    old = previous.get("conditions") or []
    replaced = (reasons.ACCEPTED, *explanation.SUMMARY)
    kept = [item for item in old if item["type"] not in replaced and item["reason"] != reasons.INVALID_SPEC]
    was_invalid = any(item["type"] == reasons.FAILED and item["reason"] == reasons.INVALID_SPEC for item in old)
    phase = reasons.PENDING if was_invalid else previous.get("phase", reasons.PENDING)
    status = {**previous, "phase": phase, "observedGeneration": raw["metadata"].get("generation", 0)}
    trained = (find(previous, reasons.TRAINING) or {}).get("status") == "True"
    status = _reported(status, [accepted], raw, now, trained=trained)
    first, *summary = status["conditions"]
    return {**status, "conditions": [first, *kept, *summary]}
