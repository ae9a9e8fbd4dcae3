"""Why a pod does not do its work yet: a reason for programs and a sentence for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stage2_api.pod.report import read_termination_message
from stage2_controller.job import names as roles
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import STOPPED, Object, ended, running, terminating

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_TAIL = 400  # characters of a container's last message that fit a sentence


class Finding(NamedTuple):
    """What keeps a pod from its work."""

    reason: str
    message: str


def pod(observed: Object | None, what: str) -> Finding | None:
    """Return what keeps a pod from its work; None if all its containers run. what: such as "the rollout pod"."""
    if observed is None:
        return Finding(reasons.NOT_CREATED, f"{what} does not exist yet")
    if from_outside := stopped(observed, what):
        return from_outside
    status = observed.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Finding(reasons.UNSCHEDULABLE, f"no node fits {what}: {condition.get('message', 'no reason given')}")
    if missing := missing_claims(observed):
        return Finding(reasons.UNSCHEDULABLE, f"{what} waits for its claims: {missing}")
    statuses = status.get("containerStatuses", [])
    ends = ((item, item.get("state", {}).get("terminated", {})) for item in status.get("initContainerStatuses", []))
    first = [item for item, end in ends if end.get("exitCode") != 0]
    findings = [finding for item in (*first, *statuses) if (finding := _container(item))]
    if findings:
        worst = min(findings, key=lambda finding: finding.reason == reasons.CONTAINERS_STARTING)
        return worst if worst.reason != reasons.CONTAINERS_STARTING else _runs_first(status, what) or worst
    if statuses:
        return None
    doing = "is being prepared on its node" if observed.get("spec", {}).get("nodeName") else "waits for a node"
    return Finding(reasons.CONTAINERS_STARTING, f"{what} {doing}")


def _runs_first(status: Object, what: str) -> Finding | None:
    """Return that init containers still run, and the pod's own containers wait for them."""
    first = [one["name"] for one in status.get("initContainerStatuses", []) if "running" in one.get("state", {})]
    return Finding(reasons.CONTAINERS_STARTING, f"{what} waits for its {', '.join(first)}") if first else None


def stopped(observed: Object, what: str) -> Finding | None:
    """Return what ended the whole pod, or is about to; the ends of its containers are no crashes then."""
    if rejection := turned_away(observed):
        return Finding(reasons.POD_REFUSED, f"{what} was rejected: {rejection}")
    if is_evicted(observed):
        return Finding(reasons.EVICTED, how_evicted(observed))
    if terminating(observed):
        return Finding(reasons.PODS_ENDING, f"{what} was told to stop, and ends")
    reason, why = _end_of_pod(observed)
    return Finding(reasons.PODS_ENDING, f"{what} was ended on its node: {reason}: {why}") if reason else None


def _end_of_pod(observed: Object) -> tuple[str, str]:
    """Return reason and message of what ended the pod from outside, such as its node's shutdown; empty if nothing."""
    status = observed.get("status", {})
    if status.get("phase") != "Failed":
        return "", ""
    disrupted = conditions.find(status, "DisruptionTarget") or {}
    by = disrupted if disrupted.get("status") == "True" and not status.get("reason") else status
    return by.get("reason") or "", (by.get("message") or "no reason given").strip()


def is_evicted(observed: Object) -> bool:
    """Return whether the kubelet evicted a pod that it had accepted, because node or pod ran out of something.

    A node under pressure turns new pods away under the same reason; those have no containers.
    """
    status = observed.get("status", {})
    disrupted = conditions.find(status, "DisruptionTarget") or {}
    accepted = bool(status.get("containerStatuses")) or disrupted.get("status") == "True"
    return status.get("phase") == "Failed" and status.get("reason") == "Evicted" and accepted


def how_evicted(observed: Object) -> str:
    """Return the eviction of a pod in the kubelet's own words."""
    why = (observed.get("status", {}).get("message") or "no reason given").strip()
    node = observed.get("spec", {}).get("nodeName")
    return f"pod {observed['metadata']['name']} was evicted from node {node}: {why}"


def turned_away(observed: Object) -> str | None:
    """Return why the kubelet ended a pod before it started; None if it did not."""
    status = observed.get("status", {})
    if status.get("phase") != "Failed" or not status.get("reason") or status.get("containerStatuses"):
        return None
    if is_evicted(observed):
        return None
    node = observed.get("spec", {}).get("nodeName")
    return f"node {node} reports {status['reason']}: {status.get('message', 'no reason given')}"


def missing_claims(observed: Object) -> str | None:
    """Return which claims of a pod do not exist; before that the scheduler ignores the pod without a message."""
    existing = {item["name"] for item in observed.get("status", {}).get("resourceClaimStatuses") or ()}
    wanted = {
        one["name"]: one["resourceClaimTemplateName"]
        for one in observed.get("spec", {}).get("resourceClaims") or ()
        if one.get("resourceClaimTemplateName")  # about a claim named directly the scheduler reports
    }
    missing = sorted({template for name, template in wanted.items() if name not in existing})
    if not missing:
        return None
    return f"there are none yet from the ResourceClaimTemplate {', '.join(missing)}, which must be in its namespace"


def refused(deployment: Object | None) -> Finding | None:
    """Return why the API server refuses the Deployment's pod, such as a quota or a policy; None if it does not."""
    for condition in (deployment or {}).get("status", {}).get("conditions", []):
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            message = f"the API server refuses the rollout pod: {condition.get('message', 'no reason given')}"
            return Finding(reasons.POD_REFUSED, message)
    return None


def servers(observed: Object | None, names: Sequence[str], deployment: Object | None = None) -> Finding | None:
    """Return what keeps the servers from being ready; None if every server answers."""
    if (observed is None or ended(observed)) and (refusal := refused(deployment)):
        return refusal
    found = pod(observed, "the rollout pod")
    if found or observed is None:
        return found
    silent = [item["name"] for item in observed["status"]["containerStatuses"] if not item.get("ready")]
    silent = [name for name in silent if name in names]
    if not silent:
        return None
    message = f"{len(names) - len(silent)} of {len(names)} servers answer; {', '.join(silent)} still loading"
    return Finding(reasons.SERVERS_LOADING, message)


def learner(observed: Object | None, refused_with: str | None) -> Finding | None:
    """Return what keeps the learner from running; None if its container runs. refused_with: why it can have no pod."""
    if refused_with and (observed is None or ended(observed)):
        return Finding(reasons.POD_REFUSED, f"the API server refuses the learner's pod: {refused_with}")
    if terminating(observed) and running(observed, roles.ROLE_LEARNER):
        return None  # it has its time to write a checkpoint
    return pod(observed, "the learner's pod")


def unseen(parent: Object, role: str) -> Finding:
    """Return that a pod has lost the labels by which it is seen, with the command that puts them back."""
    metadata, labels = parent["metadata"], parent["metadata"].get("labels") or {}
    by_parent = parent["spec"].get("selector", {}).get("matchLabels") or {
        "batch.kubernetes.io/job-name": metadata["name"]
    }
    where = ",".join(f"{key}={value}" for key, value in by_parent.items())
    wanted = {
        roles.LABEL_JOB: labels.get(roles.LABEL_JOB), roles.LABEL_ROLE: role, roles.LABEL_MANAGED_BY: roles.MANAGED_BY,
    }  # fmt: skip
    command = f"kubectl label pods -n {metadata['namespace']} --overwrite -l {where}"
    message = (
        f"{parent['kind']} {metadata['name']} has a pod without the labels of its job, so nothing is known of it; put"
        f" them back: {command} {' '.join(f'{key}={value}' for key, value in wanted.items())}"
    )
    return Finding(reasons.LABELS_LOST, message)


def was_seen(status: Mapping[str, Any], kind: str) -> bool:
    """Return whether a pod ran in the last pass by the condition `kind`: then it may only have lost its labels."""
    before = conditions.find(status, kind) or {}
    return before.get("status") == "True" or before.get("reason") == reasons.LABELS_LOST


def outlived(orphan: Object) -> str:
    """Return that a learner's pod outlived its Job, with the command that ends it."""
    metadata = orphan["metadata"]
    command = f"kubectl delete pod {metadata['name']} -n {metadata['namespace']}"
    return f"a learner's pod outlived its Job, which was deleted with --cascade=orphan, and may still write: {command}"


def last_message(ended: Mapping[str, Any]) -> str:
    """Return how a container ended: its exit code and the end of its message."""
    report = read_termination_message(str(ended.get("message")))
    if report:
        return f"exit code {ended.get('exitCode')}: {report.message or report.phase}"
    lines = str(ended.get("message") or ended.get("reason") or "no message").splitlines()
    unindented = [line.strip() for line in lines if line[:1].strip()]  # without the frames of a traceback
    return f"exit code {ended.get('exitCode')}: {' '.join(unindented[-3:])[-_TAIL:]}"


def _container(status: Object) -> Finding | None:
    if STOPPED in status:
        return Finding(*status[STOPPED])
    name, state = status["name"], status.get("state", {})
    waiting = state.get("waiting", {}).get("reason", "")
    message = state.get("waiting", {}).get("message", waiting)
    if "running" in state:
        return None
    if waiting in _IMAGE:
        return Finding(
            reasons.IMAGE_UNAVAILABLE, f"the image {status.get('image')} of {name} cannot be pulled: {message}"
        )
    if waiting in _CONFIG:
        return Finding(reasons.CONTAINER_CONFIG, f"{name} cannot start: {message}")
    ended = state.get("terminated") or status.get("lastState", {}).get("terminated")
    if ended:
        times = f", {status['restartCount']} restarts so far" if status.get("restartCount") else ""
        return Finding(reasons.SERVER_CRASHED, f"{name} ended with {last_message(ended)}{times}")
    return Finding(reasons.CONTAINERS_STARTING, f"{name} is starting")
