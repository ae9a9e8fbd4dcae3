"""The status of a job: phase, conditions, progress, servers, reproducibility. A pure function of what is observed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from stage2_api.errors import shortened
from stage2_controller.job import authorship, names, output_folder
from stage2_controller.place.placement import Place
from stage2_controller.plan import evictions, reported
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.report import explanation
from stage2_controller.state import diagnose, ending, jobset, reasons
from stage2_controller.state.conditions import Condition, find, merged, not_after, timestamp, truth
from stage2_controller.state.observed import Object, running, terminating, waits_in_its_pod

_BUG_CHARS = 1000  # of an exception's text
_BY_HAND = {"kubectl-patch", "kubectl-edit"}


def valid_status(
    job: JobPass, *, end: Condition | None, blocked: Condition | None, quota: Condition | None, place: Place | None
) -> dict[str, Any]:
    """Return the status of a job whose spec is valid.

    end: Succeeded or Failed; blocked: ChildrenApplied, where objects of others are in the way; quota: QuotaReserved.
    """
    report = reported.report_of(job, end=end)
    of_servers = reported.servers(job, report.now.get("sync") or {}, end=end)
    status: dict[str, Any] = {
        "phase": _phase(job, end),
        "observedGeneration": job.parsed.job.metadata.generation or 0,
        "specHash": job.parsed.spec_hash,
        "currentHash": job.parsed.current_hash,
        "writtenHash": job.parsed.written_hash,
        "startTime": _start_time(job, end),
        "firstStepTime": _first_step_time(job, end),
        "completionTime": _before_or_now(job, "completionTime") if end else None,
        "node": _node(job, end, place),
        "servers": of_servers,
        **reported.summary(job, end=end),
        "images": _images(job),
        "restarts": _restarts(job),
        **job.evictions.status(),
        **report.status(),
    }
    stuck = _pods_overdue(job) if end or job.must_stop else None
    overdue = Condition(reasons.PODS_ENDED, "False", reasons.PODS_OVERDUE, stuck) if stuck else None
    if job.spec.suspend and not end:
        rest: list[Condition | None] = [_suspended(job, stuck)]
    else:
        rest = [quota, place.condition if place else None, *_of_pods(job, report, of_servers, end), end]
    status = {key: value for key, value in status.items() if value not in (None, "", [], {})}
    return _reported(status, [one for one in (_accepted(job), blocked, overdue, *rest) if one], job.raw, job.now)


def _reported(
    status: Mapping[str, Any],
    found: Sequence[Condition],
    raw: Mapping[str, Any],
    now: datetime,
    *,
    trained: bool = False,
) -> dict[str, Any]:
    """Return the status with these conditions, those that follow from them, and a message that sums them up."""
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


def _phase(job: JobPass, end: Condition | None) -> str:
    if end:
        return end.type
    if job.spec.suspend:
        return reasons.SUSPENDED
    pod = job.observed.pod(names.ROLE_LEARNER)
    if running(pod, names.ROLE_LEARNER):
        return reasons.RUNNING
    return reasons.STARTING if _bound(job) else reasons.PENDING


def _start_time(job: JobPass, end: Condition | None) -> str | None:
    """Return the start. As with batch/v1 Jobs, a resumed job starts again, and its deadline counts from there."""
    if job.spec.suspend and not end:
        return None
    return _before_or_now(job, "startTime")


def _first_step_time(job: JobPass, end: Condition | None) -> str | None:
    """Return when the learner first reported an optimizer step since the start."""
    before, learner = job.previous, None if job.observed.old_learner() else job.observed.report()
    if before.get("phase") == reasons.RUNNING and before.get("step") and "firstStepTime" not in before:
        return None  # an older controller saw the first step, and did not write down when
    stepped = before.get("firstStepTime") or (learner and learner.step)
    return _before_or_now(job, "firstStepTime") if stepped and _start_time(job, end) else None


def _before_or_now(job: JobPass, key: str) -> str:
    """Return the time in the last status, else the time of this pass.

    A time in the future came from a clock that was ahead, unless the cluster dated objects after it: ours is behind.
    """
    before = job.previous.get(key)
    if before and before <= job.observed.latest_date():
        return str(before)
    return not_after(before, job.now) if before else timestamp(job.now)


def _node(job: JobPass, end: Condition | None, place: Place | None) -> str | None:
    chosen = place.node if place else None
    return _bound(job) or chosen or (job.previous.get("node") if end else None)


def _bound(job: JobPass) -> str | None:
    """Return the node of the pods that are not being deleted."""
    pods = [job.observed.pod(role) for role in (names.ROLE_LEARNER, names.ROLE_ROLLOUT)]
    nodes = [pod["spec"].get("nodeName") for pod in pods if pod and not terminating(pod)]
    return next(filter(None, nodes), None)


def _images(job: JobPass) -> list[dict[str, str]]:
    """Return the images that the containers run, or ran where they are gone."""
    known = {item["name"]: item for item in job.previous.get("images") or []}
    for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER):
        pod = job.observed.pod(role)
        for item in pod.get("status", {}).get("containerStatuses", []) if pod else []:
            digest = item.get("imageID", "").rpartition("@")[2]
            if digest.startswith("sha256:"):
                known[item["name"]] = {"name": item["name"], "image": item["image"], "digest": digest}
    return [known[name] for name in sorted(known)]


def _restarts(job: JobPass) -> int:
    failed: int = (job.observed.learner or {}).get("status", {}).get("failed", 0)
    learner = job.observed.report()
    before: int = job.previous.get("restarts") or 0
    return max(failed + (learner.restarts if learner else 0), before)


def _accepted(job: JobPass) -> Condition:
    if job.parsed.refused:
        message = f"accepted earlier; a new start would be refused: {job.parsed.refused}"
        return Condition(reasons.ACCEPTED, "True", reasons.NO_LONGER_VALID, message)
    if ignored := ", ".join(job.parsed.ignored):
        message = f"ignored: {ignored}; this version does not know what a newer one or a webhook has filled in"
        return Condition(reasons.ACCEPTED, "True", reasons.KEYS_IGNORED, message)
    return Condition(reasons.ACCEPTED, "True", reasons.VALID, "the spec is valid")


def _of_pods(
    job: JobPass, report: reported.Report, of_servers: Sequence[reported.Server], end: Condition | None
) -> list[Condition | None]:
    """Return the conditions of servers and learner."""
    has_servers, silence = bool(of_servers), _silence(job, end)
    return [
        reported.rollout_ready(job, end=end) if has_servers else None,
        _learner_running(job, end),
        Condition(reasons.LEARNER_REACHABLE, "False", reasons.LEARNER_UNREACHABLE, silence) if silence else None,
        reported.weights_in_sync(of_servers, report.now.get("sync"), end=end) if has_servers else None,
        reported.steps_kept(job, report),
    ]


def _suspended(job: JobPass, stuck: str | None) -> Condition:
    by = f"spec.suspend is true{_set_by_hand(job.raw['metadata'])}"
    if job.holds_secret or job.observed.old_learner():
        saves = ", and the learner first writes its checkpoint" if _writes_checkpoint(job) else ""
        saves = f"; {stuck}" if stuck else saves
        return Condition(reasons.SUSPENDED, "False", reasons.PODS_ENDING, f"{by}: the pods end{saves}")
    message = f"{by}: no pod exists; set it to false to {_what_resumes(job)}"
    return Condition(reasons.SUSPENDED, "True", reasons.SUSPENDED_BY_SPEC, message)


def _pods_overdue(job: JobPass) -> str | None:
    """Return which pods of a job that has ended, or must have none, do not end; None if all do in time."""
    metadata = [(pod["metadata"], pod["spec"]["nodeName"]) for pod in ending.overdue_pods(job.observed, job.now)]
    named = [
        f"pod {one['name']} on node {node} has not ended and keeps what it has; a finalizer holds it, or its node is"
        f" silent: kubectl describe pod {one['name']} -n {one['namespace']}"
        for one, node in metadata
    ]
    return "; ".join(named) or None


def _what_resumes(job: JobPass) -> str:
    """Return what follows once the job is resumed."""
    reached = reported.furthest_step(job)
    if not reached:
        return "start"
    if where := output_folder.fleeting(job.parsed.job):
        return f"start again at step 0: {where}, and with it what a learner had done to step {reached}"
    return f"resume from the last checkpoint (a learner had done step {reached})"


def _writes_checkpoint(job: JobPass) -> bool:
    """Return whether a learner of the job runs, and what it writes as it ends will be there afterwards."""
    learner = job.observed.pod(names.ROLE_LEARNER)
    return running(learner, names.ROLE_LEARNER) and output_folder.fleeting(job.parsed.job) is None


def _set_by_hand(metadata: Mapping[str, Any]) -> str:
    """Return who set spec.suspend if no applied file has it: applying a file does not revert what was set by hand."""
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


def _learner_running(job: JobPass, end: Condition | None) -> Condition:
    def condition(status: bool, reason: str, message: str) -> Condition:
        return Condition(reasons.LEARNER_RUNNING, truth(status), reason, message)

    if end:
        return condition(False, reasons.LEARNER_FINISHED, end.message)
    if job.renews_secret:
        message = "certificates of the job expire soon, or its Secret is gone: its pods restart with new ones"
        return condition(False, reasons.SECRET_RENEWED, message)
    if old := job.observed.old_learner():
        return condition(False, reasons.OLD_LEARNER_ENDING, _how_it_ends(old, job))
    pod = job.observed.pod(names.ROLE_LEARNER)
    if waits_in_its_pod(pod):
        return condition(False, reasons.WAITING_FOR_SERVERS, "the learner starts once all servers answer")
    finding = diagnose.learner(pod, job.observed.learner_refused)
    finding = reported.lost_labels(job, names.ROLE_LEARNER, reasons.LEARNER_RUNNING) or finding
    if finding is None:
        return condition(True, reasons.LEARNER_STARTED, _doing(job))
    if finding.reason == reasons.SERVER_CRASHED:
        limit = job.spec.learner.backoff_limit
        return condition(False, reasons.LEARNER_RETRYING, f"{finding.message}; at most {limit} retries")
    return condition(False, finding.reason, finding.message)


def _silence(job: JobPass, end: Condition | None) -> str | None:
    """Return why the learner gives no report. A controller that has just started goes by what the last one wrote."""
    observed, before = job.observed, find(job.previous, reasons.LEARNER_REACHABLE)
    pod = observed.pod(names.ROLE_LEARNER)
    if end or observed.progress or terminating(pod) or not running(pod, names.ROLE_LEARNER):
        return None
    if observed.unreachable:
        return f"the learner runs and its report cannot be read: {observed.unreachable}"
    return before["message"] if before and reported.is_of_last_pod(job) else None


def _how_it_ends(old: Object, job: JobPass) -> str:
    if old not in job.observed.orphans:
        saves = "first writes its checkpoint and ends" if _writes_checkpoint(job) else "ends"
        return f"the old learner {saves}"
    return diagnose.outlived(old)


def _doing(job: JobPass) -> str:
    """Return what a learner that runs does, by its last report."""
    report, before = job.observed.progress, find(job.previous, reasons.LEARNER_RUNNING)
    if report:
        return f"the learner runs: {report.message or report.phase}"
    last = before and before["status"] == "True" and reported.is_of_last_pod(job)
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
    """Return the status after a pass that a bug ended."""
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
