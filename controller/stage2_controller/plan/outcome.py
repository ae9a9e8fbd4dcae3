"""Whether a job has ended, and how: the policy of success, failure and deadline. Pure.

An end is the condition Succeeded or Failed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from stage2_api.errors import EXIT_CONFIG, EXIT_UNAVAILABLE
from stage2_api.job import RolloutMatchingJob
from stage2_controller.job import names
from stage2_controller.plan import evictions
from stage2_controller.plan.evictions import Evictions
from stage2_controller.state import conditions, diagnose, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Object, Observed, begun, ended, succeeded, terminated, terminating

_POD_FAILURE_POLICY = "PodFailurePolicy"  # the Job's reason; its only rule that fails it is about two exit codes
_EXHAUSTED = f"exit code {EXIT_UNAVAILABLE} "  # in the Job's message


def final(status: Mapping[str, Any]) -> Condition | None:
    """Return the outcome that the status already reports. An invalid spec is none: once corrected, it runs."""
    for condition_type in (reasons.SUCCEEDED, reasons.FAILED):
        found = conditions.find(status, condition_type)
        if found and found["status"] == "True" and found["reason"] != reasons.INVALID_SPEC:
            return Condition(condition_type, "True", found["reason"], found["message"])
    return None


def outcome(
    job: RolloutMatchingJob,
    servers: Sequence[str],
    observed: Observed,
    *,
    spec_hash: str,
    status: Mapping[str, Any],
    evicted: Evictions,
    now: datetime,
) -> Condition | None:
    """Return the job's outcome, reported before or found in this pass; None while the job can still run.

    spec_hash: of the present spec. Pods of an earlier spec do not count. A training that is done stays so, whatever
    happens in the same pass: its end comes first.
    """
    return (
        final(status)
        or _of_learner(observed, spec_hash)
        or _of_servers(observed, servers, spec_hash)
        or _of_evictions(job, evicted)
        or _of_deadline(job, status, now)
        or _of_start(job, servers, observed, status=status, now=now)
    )


def seconds_left(job: RolloutMatchingJob, status: Mapping[str, Any], now: datetime) -> float | None:
    """Return the seconds until spec.activeDeadlineSeconds has passed since the start; None if one is missing."""
    limit = job.spec.active_deadline_seconds
    if limit is None or not status.get("startTime"):
        return None
    return conditions.seconds_left(conditions.instant(status["startTime"]), limit, now)


def without_old_failure(raw: Mapping[str, Any], job: RolloutMatchingJob, *, spec_hash: str) -> Mapping[str, Any]:
    """Return the job, without the status of a failure if its spec was corrected since: it starts again.

    Pods that were evicted before do not count again.
    """
    status = raw.get("status") or {}
    edited = status.get("observedGeneration") != raw["metadata"].get("generation")
    corrected = status.get("specHash", spec_hash) != spec_hash or _allowed_now(status, job)
    if not (edited and corrected and status.get("phase") == reasons.FAILED):
        return raw
    return {**raw, "status": {key: status[key] for key in evictions.KEPT if key in status}}


def _allowed_now(status: Mapping[str, Any], job: RolloutMatchingJob) -> bool:
    """Return whether a job that failed by its deadline or its eviction limit would keep the present one."""
    failed = final(status)
    if failed is None:
        return False
    if failed.reason == reasons.EVICTED_TOO_OFTEN:
        return (status.get("evictions") or 0) <= job.spec.eviction_limit
    start, end = status.get("startTime"), status.get("completionTime")
    if failed.reason != reasons.DEADLINE_EXCEEDED or not start or not end:
        return False
    taken_s = (conditions.instant(end) - conditions.instant(start)).total_seconds()
    limit_s = job.spec.active_deadline_seconds
    return limit_s is None or taken_s < limit_s


def seconds_to_start(
    job: RolloutMatchingJob, observed: Observed, status: Mapping[str, Any], now: datetime
) -> float | None:
    """Return the seconds until spec.learner.startDeadlineSeconds has passed; None if the job waits for no start."""
    stands = observed.deployment or observed.learner
    lost = observed.unseen(names.ROLE_LEARNER) and diagnose.was_seen(status, reasons.LEARNER_RUNNING)
    if job.spec.suspend or not stands or lost or learner_begun(observed) or terminating(observed.old_learner()):
        return None
    since = _has_its_place_since(job, observed, status, now)
    return None if since is None else conditions.seconds_left(since, job.spec.learner.start_deadline_seconds, now)


def learner_begun(observed: Observed) -> bool:
    """Return whether the learner's own container runs or has run, so that it no longer waits for the servers."""
    return begun(observed.pod(names.ROLE_LEARNER), names.ROLE_LEARNER)


def _has_its_place_since(
    job: RolloutMatchingJob, observed: Observed, status: Mapping[str, Any], now: datetime
) -> datetime | None:
    """Return since when the job could start: it has quota and a node. If its learner ran a moment ago, return now.

    In a JobSet the time restarts whenever a pod gets a node, and the others have as long to get theirs.
    """
    if not _has_a_node(job, observed):
        return None
    found = [conditions.find(status, kind) for kind in (reasons.QUOTA_RESERVED, reasons.PLACED)]
    if not status.get("startTime") or any(item and item["status"] != "True" for item in found):
        return None
    ran = conditions.find(status, reasons.LEARNER_RUNNING)
    if ran and ran["status"] == "True":
        return now
    pods = [pod for pod in observed.of_jobset or observed.pods if pod["spec"].get("nodeName") and not terminating(pod)]
    bound = [conditions.find(pod.get("status", {}), "PodScheduled") for pod in pods]
    children = (one["metadata"].get("creationTimestamp") for one in (observed.learner, observed.deployment) if one)
    changes = (item.get("lastTransitionTime") for item in (*found, ran, *bound) if item)
    return max(conditions.instant(time) for time in (status["startTime"], *children, *changes) if time)


def _has_a_node(job: RolloutMatchingJob, observed: Observed) -> bool:
    """Return whether the job holds a node, or lacks only a pod that the API server does not refuse.

    The first of its pods shows a place that the scheduler found: the servers', or the learner's where there is none. In
    a JobSet each pod has a node of its own.
    """
    if observed.jobset is not None:
        return any(pod["spec"].get("nodeName") and not ended(pod) for pod in observed.of_jobset)
    first = observed.pod(names.ROLE_ROLLOUT if job.spec.rollout.servers else names.ROLE_LEARNER)
    if first is None or ended(first):
        return not (diagnose.refused(observed.deployment) if job.spec.rollout.servers else observed.learner_refused)
    return bool(first["spec"].get("nodeName"))


def _of_learner(observed: Observed, spec_hash: str) -> Condition | None:
    """Return the outcome of the learner's Job; None while it can still run.

    A Job counts the end of its pod a moment later. Meanwhile the job may lose a server, or its time may pass.
    """
    pod = observed.pod(names.ROLE_LEARNER)
    done = succeeded(pod, names.ROLE_LEARNER) and _counts(pod, spec_hash)
    job_conditions = (observed.learner or {}).get("status", {}).get("conditions", [])
    found = {item["type"]: item for item in job_conditions if item["status"] == "True"}
    if done or "Complete" in found:
        return Condition(reasons.SUCCEEDED, "True", reasons.LEARNER_SUCCEEDED, "the learner ended with exit code 0")
    if "Failed" in found and not _pod_end_is_pending(observed):
        return _failed(observed, found["Failed"])
    return None


def _pod_end_is_pending(observed: Observed) -> bool:
    """Return whether the Job's watch was quicker than the pods': the end of the pod, with its reason, is on its way."""
    pod = observed.pod(names.ROLE_LEARNER)
    if pod is None or terminating(pod) or ended(pod):
        return False
    return terminated(pod, names.ROLE_LEARNER) is None


def _failed(observed: Observed, failure: Mapping[str, Any]) -> Condition:
    pod = observed.pod(names.ROLE_LEARNER)
    end = terminated(pod, names.ROLE_LEARNER) if pod else None
    words = _last_message(observed, end)
    by_policy, text = failure.get("reason") == _POD_FAILURE_POLICY, failure.get("message", "")
    code = end.get("exitCode") if end else EXIT_UNAVAILABLE if _EXHAUSTED in text else None
    if code != EXIT_UNAVAILABLE and (by_policy or code == EXIT_CONFIG):
        message = f"the learner refused its configuration: {words}"
        return Condition(reasons.FAILED, "True", reasons.CONFIGURATION_ERROR, message)
    if failure.get("reason") == reasons.BACKOFF_LIMIT or code == EXIT_UNAVAILABLE:
        message = f"the learner failed more often than spec.learner.backoffLimit allows; the last time: {words}"
        return Condition(reasons.FAILED, "True", reasons.BACKOFF_LIMIT, message)
    message = f"{failure.get('message', 'the learner failed')}; {words}"
    return Condition(reasons.FAILED, "True", reasons.LEARNER_FAILED, message)


def _last_message(observed: Observed, end: Mapping[str, Any] | None) -> str:
    report = observed.report()
    if report and report.message:
        return report.message
    return diagnose.last_message(end) if end else "its pod is gone, and its last message with it"


def _of_servers(observed: Observed, servers: Sequence[str], spec_hash: str) -> Condition | None:
    pod = observed.pod(names.ROLE_ROLLOUT)
    for server in servers if _counts(pod, spec_hash) else ():
        end = terminated(pod, server) if pod else None
        if end and end.get("exitCode") == EXIT_CONFIG:
            message = f"{server} refused its configuration: {diagnose.last_message(end)}"
            return Condition(reasons.FAILED, "True", reasons.CONFIGURATION_ERROR, message)
    return None


def _counts(pod: Object | None, spec_hash: str) -> bool:
    """Return whether the end of a pod's container says something of the present spec."""
    if pod is None or terminating(pod):  # one that is being deleted is of a suspended job, or of an earlier spec
        return False
    # Pods of a deleted Deployment or Job outlive it for a while; older controllers wrote no hash.
    of_pod = (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_SPEC_HASH, spec_hash)
    return bool(of_pod == spec_hash)


def _of_deadline(job: RolloutMatchingJob, status: Mapping[str, Any], now: datetime) -> Condition | None:
    left = seconds_left(job, status, now)
    if left is None or left > 0:
        return None
    message = f"not done {job.spec.active_deadline_seconds} s after its start (spec.activeDeadlineSeconds)"
    return Condition(reasons.FAILED, "True", reasons.DEADLINE_EXCEEDED, message)


def _of_evictions(job: RolloutMatchingJob, evicted: Evictions) -> Condition | None:
    limit = job.spec.eviction_limit
    if evicted.count <= limit:
        return None
    times = "once" if evicted.count == 1 else f"{evicted.count} times"
    message = f"pods were evicted {times}, and spec.evictionLimit allows {limit}; the last time: {evicted.last}"
    return Condition(reasons.FAILED, "True", reasons.EVICTED_TOO_OFTEN, message)


def _of_start(
    job: RolloutMatchingJob, servers: Sequence[str], observed: Observed, *, status: Mapping[str, Any], now: datetime
) -> Condition | None:
    left = seconds_to_start(job, observed, status, now)
    if left is None or left > 0:
        return None
    late = f"{job.spec.learner.start_deadline_seconds} s after the job had a node (spec.learner.startDeadlineSeconds)"
    message = f"the learner has not started {late}: {_what_it_lacks(servers, observed)}"
    return Condition(reasons.FAILED, "True", reasons.START_DEADLINE, message)


def _what_it_lacks(servers: Sequence[str], observed: Observed) -> str:
    """Return what keeps a learner that has not begun from it."""
    if not observed.learner and observed.orphans:
        return diagnose.outlived(observed.orphans[0])
    found = None
    if servers:
        found = diagnose.servers(observed.pod(names.ROLE_ROLLOUT), servers, observed.deployment)
    if not found and observed.learner and observed.unseen(names.ROLE_LEARNER):
        found = diagnose.unseen(observed.learner, names.ROLE_LEARNER)
    found = found or diagnose.learner(observed.pod(names.ROLE_LEARNER), observed.learner_refused)
    return found.message if found else "its container is not there yet"
