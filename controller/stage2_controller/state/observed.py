"""The observed state of one job: its children as the API server holds them, and the learner's last report."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stage2_api.pod.report import LearnerReport, read_termination_message
from stage2_controller.job import kinds, names

Object = Mapping[str, Any]

FILES_AGAIN_S = 45.0
"""Seconds between two looks at a job's Secret and ConfigMap, which no watch shows: a change is seen within a minute."""
POD_UID = "podUid"
"""Our key in the status of a container: the uid of its pod, where the containers of several pods are shown as one's."""
STOPPED = "podStopped"
"""Our key there: reason and message of what ended the whole pod from outside."""
_INDEX = "batch.kubernetes.io/job-completion-index"  # of a learner's pod among several; the first one reports


@dataclass(frozen=True)
class Observed:
    """The children of one job; None or empty where there is none."""

    deployment: Object | None = None
    service: Object | None = None
    networkpolicy: Object | None = None
    workload: Object | None = None  # Kueue's
    flavors: Mapping[str, Object] = field(default_factory=dict)  # Kueue's ResourceFlavors that the job was assigned
    priority_class: Object | None = None  # Kueue's WorkloadPriorityClass that the job names
    pod_priority_class: Object | None = None  # the PriorityClass that spec.placement names
    configmap: Object | None = None
    secret: Object | None = None
    learner: Object | None = None  # the batch/v1 Job
    jobset: Object | None = None  # of another controller, in place of Deployment and Job
    rollout_job: Object | None = None  # JobSet's, with the servers' pods
    pods: tuple[Object, ...] = ()
    of_jobset: tuple[Object, ...] = ()  # a JobSet's pods, where `pods` shows one of each role
    orphans: tuple[Object, ...] = ()  # learners' pods of this job that no Job controls any more
    learner_refused: str | None = None  # why the learner's Job could not create a pod, from an event
    progress: LearnerReport | None = None  # the answer of the learner's /progress, if there is one
    baseline: LearnerReport | None = None  # its first answer since the present servers were seen to run, all of them
    over_quota: str | None = None  # which ResourceQuota refuses pods that the job does not have yet
    unreachable: str | None = None  # why the learner's /progress gives no answer for long
    leaving: tuple[str, ...] = ()  # kind and name of what a deleted job of the same name left
    unowned: tuple[str, ...] = ()  # kind and name of what a deleted job of the same name left without an owner
    foreign: tuple[str, ...] = ()  # kind and name of other people's objects with a child's name

    def child(self, kind: str) -> Object | None:
        """Return the child of one kind."""
        found: Object | None = getattr(self, kinds.CHILD[kind].field)
        return found

    def pod(self, role: str) -> Object | None:
        """Return the newest pod of a role; one that is being deleted only if there is no other."""
        pods = [pod for pod in self.pods if role_of(pod) == role]
        return max(pods, key=age_rank, default=None)

    def server_processes(self) -> frozenset[tuple[str, str, int]]:
        """Return which processes of servers run: the uid of the pod, the container, and how often it has restarted."""
        return frozenset(
            (str(pod["metadata"]["uid"]), str(one["name"]), int(one.get("restartCount", 0)))
            for pod in self.pods
            if role_of(pod) == names.ROLE_ROLLOUT and not terminating(pod)
            for one in pod.get("status", {}).get("containerStatuses") or ()
            if runs(one)
        )

    def unseen(self, role: str) -> bool:
        """Return whether the Deployment or Job of a role counts a pod that nobody sees: it has lost its labels.

        So it is for a moment after a pod was created, too.
        """
        child, pod = self.child(kinds.KIND_OF_ROLE[role]), self.pod(role)
        status = (child or {}).get("status") or {}
        counted = status.get("active") if role == names.ROLE_LEARNER else status.get("replicas")
        return bool(counted) and (pod is None or ended(pod))

    def old_learner(self) -> Object | None:
        """Return a learner's pod that still runs although its Job is gone, because the job was suspended or moved."""
        if self.learner is not None and not terminating(self.learner):
            return None
        of_jobs = [pod for pod in self.pods if role_of(pod) == names.ROLE_LEARNER]
        pods = [pod for pod in (*of_jobs, *self.orphans) if not ended(pod)]
        # One that is deleted before it has a node gets none.
        return next((pod for pod in pods if pod["spec"].get("nodeName") or not terminating(pod)), None)

    def learner_ended(self) -> bool:
        """Return whether the learner Job has ended by itself, well or not."""
        conditions = (self.learner or {}).get("status", {}).get("conditions", [])
        return any(item["type"] in ("Complete", "Failed") and item["status"] == "True" for item in conditions)

    def latest_date(self) -> str:
        """Return the latest time of the cluster's own clocks in the job's objects; empty where there is none."""
        there = [one for one in (self.deployment, self.learner, *self.pods) if one is not None]
        of_learner = (self.learner or {}).get("status", {}).get("conditions", [])
        dates = [one["metadata"].get("creationTimestamp") for one in there]
        return max(filter(None, [*dates, *(item.get("lastTransitionTime") for item in of_learner)]), default="")

    def active(self) -> bool:
        """Return whether any container of the job runs or has run."""
        statuses = [item for pod in self.pods for item in pod.get("status", {}).get("containerStatuses", [])]
        return any("waiting" not in item.get("state", {}) or item.get("lastState") for item in statuses)

    def report(self) -> LearnerReport | None:
        """Return the learner's newest report: its /progress, else the message that its container ended with."""
        if self.progress is not None:
            return self.progress
        pod = self.pod(names.ROLE_LEARNER)
        end = terminated(pod, names.ROLE_LEARNER) if pod else None
        return read_termination_message(end.get("message", "")) if end else None


def terminated(pod: Object, container: str) -> Object | None:
    """Return the last end of a container (exitCode, reason, message), whether or not it runs again by now."""
    for status in pod.get("status", {}).get("containerStatuses", []):
        if status["name"] == container:
            now, before = status.get("state", {}), status.get("lastState", {})
            end: Object | None = now.get("terminated") or before.get("terminated")
            return end
    return None


def running(pod: Object | None, container: str) -> bool:
    """Return whether the container runs now."""
    statuses = pod.get("status", {}).get("containerStatuses", []) if pod else []
    return any(status["name"] == container and runs(status) for status in statuses)


def runs(container: Object) -> bool:
    """Return whether a container runs now, by its status."""
    return "running" in (container.get("state") or {})


def waits_in_its_pod(pod: Object | None) -> bool:
    """Return whether the learner's pod waits for the servers now."""
    statuses = pod.get("status", {}).get("initContainerStatuses", []) if pod else []
    return any(item["name"] == names.WAIT_CONTAINER and "running" in item.get("state", {}) for item in statuses)


def begun(pod: Object | None, container: str) -> bool:
    """Return whether the container runs or has run."""
    return pod is not None and (running(pod, container) or terminated(pod, container) is not None)


def succeeded(pod: Object | None, container: str) -> bool:
    """Return whether the container has ended with exit code 0; its Job notices a moment later."""
    end = terminated(pod, container) if pod else None
    return end is not None and end.get("exitCode") == 0


def terminating(child: Object | None) -> bool:
    """Return whether the object is being deleted and still exists."""
    return child is not None and "deletionTimestamp" in child["metadata"]


def ended(pod: Object) -> bool:
    """Return whether all containers of the pod have ended for good."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def role_of(pod: Object) -> str | None:
    """Return the role in a pod's labels, which prove nothing about whose pod it is."""
    role: str | None = (pod["metadata"].get("labels") or {}).get(names.LABEL_ROLE)
    return role


def age_rank(pod: Object) -> tuple[bool, bool, str, str]:
    """Return what orders pods: those that are deleted first, then those that do not report for others, then by age."""
    metadata = pod["metadata"]
    first = (metadata.get("annotations") or {}).get(_INDEX, "0") == "0"
    return ("deletionTimestamp" not in metadata, first, metadata.get("creationTimestamp", ""), metadata["name"])
