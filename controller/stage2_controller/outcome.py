"""Whether a job has ended, and how: the policy of success, failure and deadline."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from stage2_api.errors import EXIT_CONFIG, EXIT_EXHAUSTED
from stage2_api.job import RolloutMatchingJob
from stage2_controller import conditions, reasons
from stage2_controller.observed import Observed, ended, running, terminated, terminating
from stage2_controller.place import diagnose
from stage2_controller.spec import names

_POD_FAILURE_POLICY = "PodFailurePolicy"  # the Job's reason; its only rule that fails it is about two exit codes
_EXHAUSTED = f"exit code {EXIT_EXHAUSTED} "  # in the Job's message


class Outcome(NamedTuple):
    """The end of a job. `phase` is Succeeded or Failed."""

    phase: str
    reason: str
    message: str


def final(status: Mapping[str, Any]) -> Outcome | None:
    """Return the outcome that the status already tells. A refused spec is none: a corrected one runs."""
    for condition_type in (reasons.SUCCEEDED, reasons.FAILED):
        told = conditions.find(status, condition_type)
        if told and told["status"] == "True" and told["reason"] != reasons.INVALID_SPEC:
            return Outcome(condition_type, told["reason"], told["message"])
    return None


def outcome(
    job: RolloutMatchingJob,
    servers: Sequence[str],
    observed: Observed,
    *,
    spec_hash: str,
    status: Mapping[str, Any],
    now: datetime,
) -> Outcome | None:
    """Return the job's outcome, told before or found in this pass; None while it can still go on.

    spec_hash: of the spec as it is now, by which its servers are told from those of a spec before.
    """
    return (
        final(status)
        or of_learner(observed)
        or _of_servers(observed, servers, spec_hash)
        or _of_deadline(job, status, now)
        or _of_start(job, servers, observed, status=status, now=now)
    )


def seconds_left(job: RolloutMatchingJob, status: Mapping[str, Any], now: datetime) -> float | None:
    """Return the seconds until spec.activeDeadlineSeconds has passed since the start; None if one is missing."""
    limit = job.spec.active_deadline_seconds
    if limit is None or not status.get("startTime"):
        return None
    return conditions.seconds_left(conditions.instant(status["startTime"]), limit, now)


def seconds_to_start(
    job: RolloutMatchingJob, observed: Observed, status: Mapping[str, Any], now: datetime
) -> float | None:
    """Return the seconds until spec.learner.startDeadlineSeconds has passed; None if no server is waited for."""
    since = _has_its_place_since(observed, status, now)
    waits = job.spec.rollout.servers and not job.spec.suspend and not learner_begun(observed) and observed.deployment
    if since is None or not waits or observed.old_learner():
        return None
    return conditions.seconds_left(since, job.spec.learner.start_deadline_seconds, now)


def learner_begun(observed: Observed) -> bool:
    """Return whether the learner's own container runs or has run: it waits for the servers no more."""
    pod = observed.pod(names.ROLE_LEARNER)
    return pod is not None and (running(pod, names.ROLE_LEARNER) or terminated(pod, names.ROLE_LEARNER) is not None)


def _has_its_place_since(observed: Observed, status: Mapping[str, Any], now: datetime) -> datetime | None:
    """Return since when the servers could load: they have quota and a node; where all were ready a moment ago, now.

    Of a place that the scheduler finds only the servers' pod tells. One that nobody makes, nor refuses, is waited for.
    """
    pod = observed.pod(names.ROLE_ROLLOUT)
    if pod is None or ended(pod):
        if diagnose.refused(observed.deployment):
            return None
    elif not pod["spec"].get("nodeName"):
        return None
    told = [conditions.find(status, kind) for kind in (reasons.QUOTA_RESERVED, reasons.PLACED)]
    if not status.get("startTime") or any(item and item["status"] != "True" for item in told):
        return None
    ready = conditions.find(status, reasons.ROLLOUT_READY)
    if ready and ready["status"] == "True":
        return now
    bound = conditions.find((pod or {}).get("status", {}), "PodScheduled")
    times = [status["startTime"], *(item.get("lastTransitionTime") for item in (*told, ready, bound) if item)]
    return max(conditions.instant(time) for time in times if time)


def of_learner(observed: Observed) -> Outcome | None:
    """Return what the learner's Job has come to; None while it can still go on."""
    job_conditions = (observed.learner or {}).get("status", {}).get("conditions", [])
    told = {item["type"]: item for item in job_conditions if item["status"] == "True"}
    if "Complete" in told:
        return Outcome(reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED, "the learner ended with exit code 0")
    if "Failed" in told and not _end_to_come(observed):
        return _failed(observed, told["Failed"])
    return None


def _end_to_come(observed: Observed) -> bool:
    """Return whether the Job's watch was quicker than the pods': the pod that has ended tells why in a moment."""
    pod = observed.pod(names.ROLE_LEARNER)
    if pod is None or terminating(pod) or ended(pod):
        return False
    return terminated(pod, names.ROLE_LEARNER) is None


def _failed(observed: Observed, told: Mapping[str, Any]) -> Outcome:
    pod = observed.pod(names.ROLE_LEARNER)
    end = terminated(pod, names.ROLE_LEARNER) if pod else None
    words = _words(observed, end)
    by_policy, text = told.get("reason") == _POD_FAILURE_POLICY, told.get("message", "")
    code = end.get("exitCode") if end else EXIT_EXHAUSTED if _EXHAUSTED in text else None
    if code != EXIT_EXHAUSTED and (by_policy or code == EXIT_CONFIG):
        return Outcome(reasons.FAILED, reasons.CONFIGURATION_ERROR, f"the learner refused its configuration: {words}")
    if told.get("reason") == reasons.BACKOFF_LIMIT or code == EXIT_EXHAUSTED:
        message = f"the learner failed more often than spec.learner.backoffLimit allows; the last time: {words}"
        return Outcome(reasons.FAILED, reasons.BACKOFF_LIMIT, message)
    return Outcome(reasons.FAILED, reasons.LEARNER_FAILED, f"{told.get('message', 'the learner failed')}; {words}")


def _words(observed: Observed, end: Mapping[str, Any] | None) -> str:
    report = observed.report()
    if report and report.message:
        return report.message
    return diagnose.last_words(end) if end else "its pod is gone, and its last words with it"


def _of_servers(observed: Observed, servers: Sequence[str], spec_hash: str) -> Outcome | None:
    pod = observed.pod(names.ROLE_ROLLOUT)
    if pod is None or terminating(pod):  # one that goes is of a job that was suspended, or of a spec before this one
        return None
    # The garbage collector comes to the pods of a deleted Deployment later; older controllers wrote no hash.
    if (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_SPEC_HASH, spec_hash) != spec_hash:
        return None
    for server in servers:
        end = terminated(pod, server)
        if end and end.get("exitCode") == EXIT_CONFIG:
            message = f"{server} refused its configuration: {diagnose.last_words(end)}"
            return Outcome(reasons.FAILED, reasons.CONFIGURATION_ERROR, message)
    return None


def _of_deadline(job: RolloutMatchingJob, status: Mapping[str, Any], now: datetime) -> Outcome | None:
    left = seconds_left(job, status, now)
    if left is None or left > 0:
        return None
    message = f"not done {job.spec.active_deadline_seconds} s after its start (spec.activeDeadlineSeconds)"
    return Outcome(reasons.FAILED, reasons.DEADLINE_EXCEEDED, message)


def _of_start(
    job: RolloutMatchingJob, servers: Sequence[str], observed: Observed, *, status: Mapping[str, Any], now: datetime
) -> Outcome | None:
    left = seconds_to_start(job, observed, status, now)
    finding = diagnose.servers(observed.pod(names.ROLE_ROLLOUT), servers, observed.deployment)
    if left is None or left > 0 or finding is None:
        return None
    late = f"{job.spec.learner.start_deadline_seconds} s after they had a node (spec.learner.startDeadlineSeconds)"
    return Outcome(reasons.FAILED, reasons.START_DEADLINE, f"not all servers answer {late}: {finding.message}")
