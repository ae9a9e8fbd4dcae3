"""The binding of a job's pods to nodes: which pod has one, which is refused one, since when and why. Pure."""

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import NamedTuple

from stage2_controller.job import conditions, kinds, names, reasons
from stage2_controller.job.observed import Object, Observed, terminating

_CHILD_OF = {role: kind for kind, role in kinds.ROLE_OF_PODS.items()}
OVERDUE_S = 300.0
"""How long a pod may outlive the grace that its deletion left it, before it counts as one that does not end."""
# In a sentence of the scheduler: what no other node would mend. kube-scheduler 1.29 to 1.35, plugins VolumeBinding,
# VolumeRestrictions and DynamicResources.
_OF_NO_NODE = (
    "persistentvolumeclaim",
    "unbound immediate PersistentVolumeClaims",
    "didn't find available persistent volumes to bind",
    "bound to non-existent pv",
    "ReadWriteOncePod access mode already in-use",
    "resourceclaim",
)
# What no other node of the zone would: VolumeBinding of 1.34 and of before, VolumeZone.
_OF_ZONE = (
    "didn't match PersistentVolume's node affinity",
    "volume node affinity conflict",
    "had no available volume zone",
)


class Refusal(NamedTuple):
    """A pod that gets no node, or is not even made."""

    since: datetime
    reason: str
    message: str

    @property
    def of_node(self) -> bool:
        """Whether another node may take what this one refuses."""
        told = self.message.casefold()
        return self.reason == reasons.UNSCHEDULABLE and not any(words.casefold() in told for words in _OF_NO_NODE)

    @property
    def of_zone(self) -> bool:
        """Whether no node of the same zone would take it either: its volumes lie in another."""
        return any(words in self.message for words in _OF_ZONE)


def refusal(observed: Observed) -> Refusal | None:
    """Return what refuses a pod of the job; None while its own old pods make way, or it is about to preempt others."""
    if any(terminating(pod) for pod in observed.pods):
        return None
    for pod in observed.pods:
        if pod["spec"].get("nodeName") or pod.get("status", {}).get("nominatedNodeName"):
            continue
        told = conditions.find(pod.get("status", {}), "PodScheduled")
        if told and told.get("reason") == "Unschedulable":
            since = conditions.instant(told["lastTransitionTime"])
            return Refusal(since, reasons.UNSCHEDULABLE, told.get("message", "no reason given"))
    return _not_made(observed)


def half_placed(observed: Observed, roles: Collection[str]) -> tuple[str, datetime] | None:
    """Return the role whose pod has no node while the other's has one, and since when that is so.

    roles: those of the job's pods. A child that the API server refuses has no pod either; a new learner is not missing
    while an old one ends.
    """
    if len(roles) < len(_CHILD_OF) or observed.old_learner() or any(map(terminating, observed.pods)):
        return None
    pods = {role: observed.pod(role) for role in _CHILD_OF}
    bound = [pod for pod in pods.values() if pod is not None and pod["spec"].get("nodeName")]
    if len(bound) != 1:
        return None
    missing, other = next((role, pod) for role, pod in pods.items() if pod is not bound[0])
    if other is not None and other.get("status", {}).get("nominatedNodeName"):  # those that it preempts take their time
        return None
    told = conditions.find(bound[0].get("status", {}), "PodScheduled") or {}
    since = conditions.instant(told.get("lastTransitionTime") or bound[0]["metadata"]["creationTimestamp"])
    made = (child_of(observed, missing) or {}).get("metadata", {}).get("creationTimestamp")
    return missing, max(since, conditions.instant(made)) if made else since


def child_of(observed: Observed, role: str) -> Object | None:
    """Return the child whose pods play this role."""
    return observed.child(_CHILD_OF[role])


def seconds_left(since: datetime, limit_s: float, now: datetime) -> float:
    """Return the seconds until `limit_s` have passed since then; none are left at 0 and below."""
    return (since + timedelta(seconds=limit_s) - now).total_seconds()


def overdue(pod: Object, now: datetime) -> bool:
    """Return whether the pod should have ended long ago: its node does not answer, or something holds it."""
    return terminating(pod) and seconds_to_overdue(pod, now) <= 0


def seconds_to_overdue(pod: Object, now: datetime) -> float:
    """Return the seconds until a pod that is being deleted counts as one that does not end."""
    return seconds_left(conditions.instant(pod["metadata"]["deletionTimestamp"]), OVERDUE_S, now)


def taken(observed: Observed) -> str:
    """Say that Kueue took the learner's Job for one of its own, and what mends it; empty where it did not."""
    labels = observed.learner["metadata"].get("labels") or {} if observed.learner else {}
    if names.LABEL_QUEUE not in labels:
        return ""
    return (
        f"Kueue charges the learner's Job to the queue {labels[names.LABEL_QUEUE]} as well, as every Job of a namespace"
        f" that has a LocalQueue of the name default: add {names.KIND}.v1alpha1.{names.GROUP} to"
        " integrations.externalFrameworks of Kueue's configuration"
    )


def _not_made(observed: Observed) -> Refusal | None:
    """Return why nobody makes a pod: Kueue holds the learner's, or the API server takes no rollout pod."""
    learner = observed.learner
    if learner is not None and learner["spec"].get("suspend") and (message := taken(observed)):
        since = conditions.instant(learner["metadata"]["creationTimestamp"])
        return Refusal(since, reasons.QUEUED_TWICE, message)
    deployment: Object = observed.deployment or {}
    told = conditions.find(deployment.get("status", {}), "ReplicaFailure")
    if told is None or told["status"] != "True" or observed.pod(names.ROLE_ROLLOUT) is not None:
        return None
    return Refusal(conditions.instant(told["lastTransitionTime"]), reasons.POD_REFUSED, told.get("message", ""))
