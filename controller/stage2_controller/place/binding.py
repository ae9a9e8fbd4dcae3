"""The binding of a job's pods to nodes: which pod has one, which is refused one, since when and why. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeGuard

from stage2_controller import conditions, reasons
from stage2_controller.observed import Object, Observed, ended, role_of, terminating
from stage2_controller.place import diagnose
from stage2_controller.spec import kinds, names

_TOLD_OF = {names.ROLE_ROLLOUT: reasons.ROLLOUT_READY, names.ROLE_LEARNER: reasons.LEARNER_RUNNING}
OVERDUE_S = 300.0
"""How long a pod may outlive the grace that its deletion left it, before it counts as one that does not end."""
NOMINATED_S = 300.0
"""How long the scheduler may keep a node for a pod: those that it preempts there take their time, and some for ever."""
_TURNED_AWAY_FOR_S, _TURNED_AWAY_WITHIN_S, _TURNED_AWAY_TIMES = 60.0, 120.0, 3
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


def refusal(observed: Observed, now: datetime) -> Refusal | None:
    """Return what refuses a pod of the job; None while its own old pods make way, or it is about to preempt others."""
    observed = _lasting(observed, now)
    if any(map(terminating, observed.pods)):
        return None
    for pod in observed.pods:
        if pod["spec"].get("nodeName") or (nominated(pod) and _seconds_nominated(pod, now) > 0):
            continue
        told = conditions.find(pod.get("status", {}), "PodScheduled")
        if told and told.get("reason") == "Unschedulable":
            return Refusal(_judged_at(pod), reasons.UNSCHEDULABLE, told.get("message", "no reason given"))
    return _not_made(observed)


def turned_away(observed: Observed, node: str, now: datetime) -> str | None:
    """Return what the node says if it has taken none of the pods of a role for a minute; None if it has.

    A kubelet whose devices are ill, or which shuts down, ends each pod before it starts, and the next one is tied to
    the node as well. One that has only just begun to work may do so for a moment.
    """
    for role in kinds.KIND_OF_ROLE:
        newest_one = observed.pod(role)
        if newest_one is None or newest_one.get("status", {}).get("containerStatuses"):
            continue
        there = [pod for pod in observed.pods if role_of(pod) == role and pod["spec"].get("nodeName") == node]
        found = [(_age_s(pod, now), pod) for pod in there if diagnose.turned_away(pod)]
        recent = [age for age, _ in found if age < _TURNED_AWAY_WITHIN_S]
        if len(recent) >= _TURNED_AWAY_TIMES and max(recent) >= _TURNED_AWAY_FOR_S:
            return diagnose.turned_away(min(found, key=lambda one: one[0])[1])
    return None


def half_placed(
    observed: Observed, roles: Collection[str], status: Mapping[str, Any], now: datetime
) -> tuple[str, datetime] | None:
    """Return the role whose pod has no node while the other's has one, and since when that is so.

    roles: those of the job's pods. A child that the API server refuses has no pod either; a new learner is not missing
    while an old one ends. status: the one that the last pass wrote.
    """
    if len(roles) < len(kinds.KIND_OF_ROLE) or observed.old_learner():
        return None
    if any(map(terminating, _lasting(observed, now).pods)):
        return None
    pods = newest(observed, now)
    bound = [pod for pod in pods.values() if pod is not None and pod["spec"].get("nodeName")]
    if len(bound) != 1:
        return None
    missing, other = next((role, pod) for role, pod in pods.items() if pod is not bound[0])
    made = (child_of(observed, missing) or {}).get("metadata", {}).get("creationTimestamp")
    times = [_judged_at(bound[0]), *([conditions.instant(made)] if made else [])]
    if nominated(other):
        times.append(_judged_at(other))
    elif other is not None:
        times.append(conditions.instant(other["metadata"]["creationTimestamp"]))
    elif observed.pod(missing) is None:
        times += _there_until(missing, status, now)
    return missing, max(times)


def newest(observed: Observed, now: datetime) -> dict[str, Object | None]:
    """Return the newest pod of each role, without those that are being deleted and for whose end nothing waits."""
    lasting = _lasting(observed, now)
    return {role: lasting.pod(role) for role in kinds.KIND_OF_ROLE}


def nominated(pod: Object | None) -> TypeGuard[Object]:
    """Return whether the pod has no node yet, and is to get one where it preempts others."""
    return pod is not None and not pod["spec"].get("nodeName") and bool(pod.get("status", {}).get("nominatedNodeName"))


def seconds_of_grace(observed: Observed, now: datetime) -> float | None:
    """Return the seconds until a pod that makes way, or preempts others, has had its time; None if there is none."""
    lasting = _lasting(observed, now).pods
    left = [
        seconds_to_overdue(pod, now) if terminating(pod) else _seconds_nominated(pod, now)
        for pod in lasting
        if terminating(pod) or nominated(pod)
    ]
    return min((some for some in left if some > 0), default=None)


def child_of(observed: Observed, role: str) -> Object | None:
    """Return the child whose pods play this role."""
    return observed.child(kinds.KIND_OF_ROLE[role])


def overdue(pod: Object, now: datetime) -> bool:
    """Return whether the pod should have ended long ago: its node does not answer, or something holds it."""
    return terminating(pod) and seconds_to_overdue(pod, now) <= 0


def seconds_to_overdue(pod: Object, now: datetime) -> float:
    """Return the seconds until a pod that is being deleted counts as one that does not end."""
    metadata = pod["metadata"]
    grace_s = metadata.get("deletionGracePeriodSeconds") or 0
    asked_at = conditions.instant(metadata["deletionTimestamp"]) - timedelta(seconds=grace_s)
    return conditions.seconds_left(asked_at, grace_s + OVERDUE_S, now)


def learner_unmade_since(observed: Observed, status: Mapping[str, Any]) -> datetime | None:
    """Return since when the learner's Job may have had no pod; None where it has one, or is to have none.

    A pod that ran and is gone was there until its condition changed; one that has ended and stays is none from then on.
    status: the one that the last pass wrote.
    """
    learner = observed.learner
    if learner is None or terminating(learner) or learner["spec"].get("suspend") or observed.learner_ended():
        return None
    pod = observed.pod(names.ROLE_LEARNER)
    if pod is not None and not ended(pod):
        return None
    told = conditions.find(status, reasons.LEARNER_RUNNING) or {}
    times = [learner["metadata"].get("creationTimestamp"), told.get("lastTransitionTime"), *_ends(pod)]
    return max((conditions.instant(time) for time in times if time), default=None)


def apart(observed: Observed) -> tuple[dict[str, str], datetime] | None:
    """Return the nodes of servers and learner, by role, where they are two, and since when; None where they are one.

    A pod that is made anew says nothing of the node where its Deployment was to wait for any.
    """
    there = {role: observed.pod(role) for role in kinds.KIND_OF_ROLE}
    live = {role: pod for role, pod in there.items() if pod and _is_live(pod, child_of(observed, role))}
    nodes = {role: str(pod["spec"]["nodeName"]) for role, pod in live.items() if pod["spec"].get("nodeName")}
    return (nodes, max(map(_judged_at, live.values()))) if len(set(nodes.values())) > 1 else None


def _is_live(pod: Object, child: Object | None) -> bool:
    """Return whether the pod is one of this child's that goes on: of one before it the garbage collector takes it."""
    if child is None or terminating(pod) or ended(pod):
        return False
    made = child["metadata"].get("creationTimestamp")
    return made is None or conditions.instant(pod["metadata"]["creationTimestamp"]) >= conditions.instant(made)


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


def _lasting(observed: Observed, now: datetime) -> Observed:
    """Return what is observed without pods that are being deleted and have ended, or should have long ago.

    Only others keep them, such as by a finalizer, and for as long as they like. Nor do pods count that have ended and
    whose successor is refused: they hold nothing, and their objects stay.
    """
    unmade = {names.ROLE_LEARNER} if observed.learner_refused else set()
    unmade |= {names.ROLE_ROLLOUT} if diagnose.refused(observed.deployment) else set()

    def lasts(pod: Object) -> bool:
        if ended(pod):
            return not terminating(pod) and role_of(pod) not in unmade
        return not overdue(pod, now)

    return replace(observed, pods=tuple(filter(lasts, observed.pods)))


def _ends(pod: Object | None) -> list[str]:
    """Return the times at which what a pod was changed last: of one that has ended, those of its end."""
    told: Sequence[Mapping[str, Any]] = ((pod or {}).get("status") or {}).get("conditions") or ()
    return [item["lastTransitionTime"] for item in told if item.get("lastTransitionTime")]


def _age_s(pod: Object, now: datetime) -> float:
    return (now - conditions.instant(pod["metadata"]["creationTimestamp"])).total_seconds()


def _judged_at(pod: Object) -> datetime:
    """Return when the scheduler bound the pod, or first refused it; when it was made, if it has said neither."""
    told = conditions.find(pod.get("status", {}), "PodScheduled") or {}
    return conditions.instant(told.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])


def _there_until(role: str, status: Mapping[str, Any], now: datetime) -> list[datetime]:
    """Return until when a pod that is gone may have been there: it ran until the condition that tells of it changed."""
    told = conditions.find(status, _TOLD_OF[role])
    if told is None:
        return []
    return [now if told["status"] == "True" else conditions.instant(told["lastTransitionTime"])]


def _seconds_nominated(pod: Object, now: datetime) -> float:
    return conditions.seconds_left(_judged_at(pod), NOMINATED_S, now)


def _not_made(observed: Observed) -> Refusal | None:
    """Return why nobody makes a pod: Kueue holds the learner's, or the API server takes one of the two not.

    An event tells of the learner's, a minute after its Job was made at the earliest.
    """
    learner = observed.learner
    if learner is not None and learner["spec"].get("suspend") and (message := taken(observed)):
        since = conditions.instant(learner["metadata"]["creationTimestamp"])
        return Refusal(since, reasons.QUEUED_TWICE, message)
    deployment: Object = observed.deployment or {}
    told = conditions.find(deployment.get("status", {}), "ReplicaFailure")
    if told and told["status"] == "True" and observed.pod(names.ROLE_ROLLOUT) is None:
        since = told.get("lastTransitionTime") or deployment["metadata"]["creationTimestamp"]
        return Refusal(conditions.instant(since), reasons.POD_REFUSED, told.get("message", ""))
    if learner is not None and observed.learner_refused:
        since = conditions.instant(learner["metadata"]["creationTimestamp"])
        return Refusal(since, reasons.POD_REFUSED, observed.learner_refused)
    return None
