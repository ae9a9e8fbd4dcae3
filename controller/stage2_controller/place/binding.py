"""The scheduler's progress with a job's pods: which are bound, which are refused, since when and why. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from stage2_controller.job import kinds, names
from stage2_controller.state import conditions, diagnose, ending, reasons
from stage2_controller.state.observed import Object, Observed, ended, role_of, terminating

REFUSED_S = 15.0
"""How long a pod must have been refused before that counts: a pod that is about to preempt others is refused first."""
ATTEMPT_S = 100.0
"""How long one pod of a job may hold a node while the other has none, and nothing refuses that one."""
UNMADE_S = 60.0
"""How long the learner's Job may have no pod before events are read for the reason."""
PREEMPTS_S = 300.0
"""How long the scheduler may evict others for a pod, while the job holds no node."""
_TURNED_AWAY_FOR_S, _TURNED_AWAY_WITHIN_S, _TURNED_AWAY_TIMES = 60.0, 120.0, 3
_CONDITION_OF = {names.ROLE_ROLLOUT: reasons.ROLLOUT_READY, names.ROLE_LEARNER: reasons.LEARNER_RUNNING}
# Parts of the scheduler's messages about what no other node would mend. kube-scheduler 1.30 to 1.37, plugins
# VolumeBinding, VolumeRestrictions and DynamicResources.
_OF_NO_NODE = (
    "persistentvolumeclaim",
    "unbound immediate PersistentVolumeClaims",
    "didn't find available persistent volumes to bind",
    "bound to non-existent pv",
    "ReadWriteOncePod access mode already in-use",
    "resourceclaim",
)


class Refusal(NamedTuple):
    """Why a pod gets no node, or is not even created."""

    since: datetime
    reason: str
    message: str

    @property
    def of_node(self) -> bool:
        """Whether another node may take what this one refuses."""
        message = self.message.casefold()
        return self.reason == reasons.UNSCHEDULABLE and not any(words.casefold() in message for words in _OF_NO_NODE)


@dataclass(frozen=True)
class Incomplete:
    """A job whose pods are not all bound to one node."""

    nodes: Mapping[str, str]  # by role, of the bound pods
    missing: tuple[str, ...]  # roles without a bound pod
    since: datetime
    refusal: Refusal | None
    preempts: bool  # the scheduler evicts others for one of its pods

    @property
    def is_apart(self) -> bool:
        """Whether servers and learner are bound to different nodes."""
        return len(set(self.nodes.values())) > 1

    @property
    def limit_s(self) -> float | None:
        """Seconds after which the job gives its node up; None where it holds nothing and another node would not help.

        While half of the job holds GPUs, the other half has little time.
        """
        if self.is_apart:
            return REFUSED_S
        if self.preempts:
            return ATTEMPT_S if self.nodes else PREEMPTS_S
        if self.refusal and (self.nodes or self.refusal.of_node):
            return REFUSED_S
        return ATTEMPT_S if self.nodes else None


def incomplete(
    observed: Observed, roles: Collection[str], status: Mapping[str, Any], now: datetime
) -> Incomplete | None:
    """Return which pods of the job miss a node; None if all have the same one, or old pods of the job still make way.

    A pod that has lost its labels misses none. roles: of the job's pods; status: the one that the last pass wrote.
    """
    lasting, roles = _without_finished(observed, now), [role for role in roles if not observed.unseen(role)]
    if not roles or any(map(terminating, lasting.pods)) or observed.old_learner():
        return None
    pods = {role: _current_pod(lasting, role) for role in roles}
    nodes = {role: str(pod["spec"]["nodeName"]) for role, pod in pods.items() if pod and pod["spec"].get("nodeName")}
    missing = tuple(role for role in roles if role not in nodes)
    if not missing and len(set(nodes.values())) == 1:
        return None
    preempting = [pod for pod in pods.values() if _is_nominated(pod)]
    refusal = _refusal(lasting, pods)
    times = [_since(observed, role, pods[role], status, now) for role in roles]
    if refusal:
        times.append(refusal.since)
    return Incomplete(nodes, missing, max(times), refusal, bool(preempting))


def is_leaving(observed: Observed, roles: Collection[str]) -> bool:
    """Return whether a pod of these roles is ending or has no node: it cannot be replaced on a cordoned node."""
    pods = [_current_pod(observed, role) for role in roles if not observed.unseen(role)]
    return any(pod is None or terminating(pod) or not pod["spec"].get("nodeName") for pod in pods)


def turned_away(observed: Observed, node: str, now: datetime) -> str | None:
    """Return what the node's kubelet says if it has rejected every pod of a role for a minute; None if it has not.

    A kubelet with failed devices, or one that shuts down, ends each pod before it starts, and the next one is tied to
    the node as well. One that has only just started may do so for a moment.
    """
    for role in kinds.KIND_OF_ROLE:
        newest = observed.pod(role)
        if newest is None or newest.get("status", {}).get("containerStatuses"):
            continue
        there = [pod for pod in observed.pods if role_of(pod) == role and pod["spec"].get("nodeName") == node]
        rejected = [((now - _created(pod)).total_seconds(), pod) for pod in there if diagnose.turned_away(pod)]
        recent = [age for age, _ in rejected if age < _TURNED_AWAY_WITHIN_S]
        if len(recent) >= _TURNED_AWAY_TIMES and max(recent) >= _TURNED_AWAY_FOR_S:
            return diagnose.turned_away(min(rejected, key=lambda one: one[0])[1])
    return None


def learner_unmade_since(observed: Observed, status: Mapping[str, Any]) -> datetime | None:
    """Return since when the learner's Job may have had no pod; None where it has one, or is to have none.

    A pod that ran and no longer exists counts until its condition changed; one that has ended, until it ended.
    status: the one that the last pass wrote.
    """
    learner = observed.learner
    if learner is None or terminating(learner) or learner["spec"].get("suspend") or observed.learner_ended():
        return None
    pod = observed.pod(names.ROLE_LEARNER)
    if pod is not None and not ended(pod):
        return None
    running = conditions.find(status, reasons.LEARNER_RUNNING) or {}
    of_pod = ((pod or {}).get("status") or {}).get("conditions") or ()
    times = [item.get("lastTransitionTime") for item in (running, *of_pod)]
    return max(
        map(conditions.instant, filter(None, [learner["metadata"].get("creationTimestamp"), *times])), default=None
    )


def taken_by_kueue(observed: Observed) -> str:
    """Return that Kueue took the learner's Job for one of its own, and the remedy; empty where it did not."""
    labels = observed.learner["metadata"].get("labels") or {} if observed.learner else {}
    if names.LABEL_QUEUE not in labels:
        return ""
    return (
        f"Kueue charges the learner's Job to the queue {labels[names.LABEL_QUEUE]} as well, as every Job of a namespace"
        f" that has a LocalQueue of the name default: add {names.KIND}.v1alpha1.{names.GROUP} to"
        " integrations.externalFrameworks of Kueue's configuration"
    )


def _without_finished(observed: Observed, now: datetime) -> Observed:
    """Return what is observed without the pods that nothing waits for.

    Those are pods that are deleted and have ended, or should have long ago: somebody's finalizer keeps them. A pod that
    has ended and whose successor is refused holds nothing either.
    """
    refused = {names.ROLE_LEARNER} if observed.learner_refused else set()
    refused |= {names.ROLE_ROLLOUT} if diagnose.refused(observed.deployment) else set()

    def lasts(pod: Object) -> bool:
        if ended(pod):
            return not terminating(pod) and role_of(pod) not in refused
        return not ending.overdue(pod, now)

    return replace(observed, pods=tuple(filter(lasts, observed.pods)))


def _current_pod(observed: Observed, role: str) -> Object | None:
    """Return the newest pod of a role; None where it belongs to an earlier child, which the garbage collector ends."""
    pod, child = observed.pod(role), observed.child(kinds.KIND_OF_ROLE[role])
    if pod is None or child is None:
        return pod
    created = child["metadata"].get("creationTimestamp")
    older = created and _created(pod) < conditions.instant(created)
    return None if older else pod


def _refusal(observed: Observed, pods: Mapping[str, Object | None]) -> Refusal | None:
    """Return what refuses one of these pods; None while the scheduler evicts others for it."""
    for pod in pods.values():
        if pod is None or pod["spec"].get("nodeName") or _is_nominated(pod):
            continue
        scheduled = conditions.find(pod.get("status", {}), "PodScheduled")
        if scheduled and scheduled.get("reason") == "Unschedulable":
            message = scheduled.get("message", "no reason given")
            return Refusal(_judged_at(pod), reasons.UNSCHEDULABLE, message)
    return _refused_child(observed)


def _refused_child(observed: Observed) -> Refusal | None:
    """Return why a pod is not even created: Kueue holds the learner's Job, or the API server refuses one of the two."""
    learner, deployment = observed.learner, observed.deployment
    if learner is not None and learner["spec"].get("suspend") and (message := taken_by_kueue(observed)):
        return Refusal(_created(learner), reasons.QUEUED_TWICE, message)
    if learner is not None and observed.learner_refused:
        return Refusal(_created(learner), reasons.POD_REFUSED, observed.learner_refused)
    failure = conditions.find((deployment or {}).get("status", {}), "ReplicaFailure")
    if deployment and failure and failure["status"] == "True" and observed.pod(names.ROLE_ROLLOUT) is None:
        since = failure.get("lastTransitionTime")
        return Refusal(
            conditions.instant(since) if since else _created(deployment),
            reasons.POD_REFUSED,
            failure.get("message", ""),
        )
    return None


def _since(observed: Observed, role: str, pod: Object | None, status: Mapping[str, Any], now: datetime) -> datetime:
    """Return when a role's pod reached its present state: judged by the scheduler, created, or deleted."""
    if pod is not None:
        return _judged_at(pod) if pod["spec"].get("nodeName") or _is_nominated(pod) else _created(pod)
    overdue_one = observed.pod(role)
    if overdue_one is not None and terminating(overdue_one):
        return conditions.instant(overdue_one["metadata"]["deletionTimestamp"])
    running = conditions.find(status, _CONDITION_OF[role]) or {}
    if running.get("status") == "True" or running.get("reason") == reasons.OLD_LEARNER_ENDING:
        return now  # it existed a moment ago, or its child is created in this pass
    child = observed.child(kinds.KIND_OF_ROLE[role])
    placed = conditions.find(status, reasons.PLACED) or {}
    texts = [
        (child or {}).get("metadata", {}).get("creationTimestamp"),
        running.get("lastTransitionTime"),
        placed.get("lastTransitionTime") if child is None else None,
    ]
    return max(map(conditions.instant, filter(None, texts)), default=now)


def _is_nominated(pod: Object | None) -> bool:
    """Return whether the pod has no node yet, and is to get one where the scheduler evicts others for it."""
    return pod is not None and not pod["spec"].get("nodeName") and bool(pod.get("status", {}).get("nominatedNodeName"))


def _judged_at(pod: Object) -> datetime:
    """Return when the scheduler bound the pod, or first refused it; when it was created, if it did neither."""
    scheduled = conditions.find(pod.get("status", {}), "PodScheduled") or {}
    since = scheduled.get("lastTransitionTime")
    return conditions.instant(since) if since else _created(pod)


def _created(body: Object) -> datetime:
    return conditions.instant(body["metadata"]["creationTimestamp"])
