"""What is observed of a JobSet, in the terms of a job on one node: a Deployment, a learner's Job, a pod of each. Pure.

So outcome, status and deadlines are the same for both engines.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from stage2_api.errors import EXIT_CONFIG
from stage2_controller.job import names
from stage2_controller.state import conditions, diagnose, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import (
    POD_UID,
    STOPPED,
    Object,
    Observed,
    age_rank,
    begun,
    ended,
    role_of,
    succeeded,
    terminated,
    terminating,
)

INSTALL = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/latest/download/manifests.yaml"
)
"""The command that installs JobSet, as its own documentation has it."""
SETTLES_S = 2.0
"""Seconds until the next look at a JobSet whose learner has failed: it ends a moment later, and nobody watches it."""
QUEUED_S = 15.0
"""Seconds between looks at a JobSet without pods."""
_NUMBER = re.compile(r"[0-9]{1,9}")
_WAITS = {"ready": False, "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}
_OF_POLICY = "FailJobSetFailurePolicyAction"  # JobSet's reason where a rule of its failurePolicy ended it


def on_one_node(observed: Observed, *, pods: int, per_pod: int, learners: int) -> Observed:
    """Return what is observed as if one pod had all servers, and one the learner.

    pods: wanted, of servers; learners: pods of the learner.
    """
    of_learner = [pod for pod in observed.pods if role_of(pod) == names.ROLE_LEARNER]
    ending = [pod for pod in observed.pods if terminating(pod)]
    one_each = [*_servers(observed.pods, pods, per_pod), *_learner(of_learner, learners)]
    found = observed.jobset
    if found is None:
        return replace(observed, pods=(*one_each, *ending), of_jobset=observed.pods)
    templates = {one["name"]: one["template"]["spec"]["template"] for one in found["spec"]["replicatedJobs"]}
    metadata = found["metadata"]
    failed = sum(pod.get("status", {}).get("phase") == "Failed" and not _is_disrupted(pod) for pod in of_learner)
    status = {"conditions": list(_ends(found)), "failed": failed}
    job = {"metadata": metadata, "spec": {"template": templates[names.ROLE_LEARNER]}, "status": status}
    servers = templates.get(names.ROLE_ROLLOUT)
    deployment = {"metadata": metadata, "spec": {"template": servers}, "status": {}} if servers else None
    pods_of_roles = (*one_each, *ending)
    return replace(observed, learner=job, deployment=deployment, pods=pods_of_roles, of_jobset=observed.pods)


def quota(raw: Object, found: Object | None, wanted: int, allowed: int) -> Condition | None:
    """Return the condition QuotaReserved of a job that names a queue: Kueue itself suspends and resumes its JobSet.

    wanted, allowed: pods of servers.
    """
    queue = (raw["metadata"].get("labels") or {}).get(names.LABEL_QUEUE)
    if not queue or found is None or "suspend" not in found["spec"]:  # Kueue writes it into each JobSet of a queue
        return None
    if not found["spec"].get("suspend"):
        message = f"Kueue admitted the JobSet through {queue}"
        if allowed < wanted:
            message += f" with {allowed} rollout pods; suspend and resume the job to ask for all {wanted}"
        return Condition(reasons.QUOTA_RESERVED, "True", reasons.ADMITTED, message)
    message = f"waits in queue {queue}: Kueue has not admitted JobSet {found['metadata']['name']}"
    return Condition(reasons.QUOTA_RESERVED, "False", reasons.QUOTA_PENDING, message)


def _ends(found: Object) -> Iterable[Mapping[str, str]]:
    """Yield the conditions that a learner's Job would have: the JobSet ends with its learner."""
    for item in found.get("status", {}).get("conditions") or ():
        if item["status"] != "True" or item["type"] not in ("Completed", "Failed"):
            continue
        reason = "PodFailurePolicy" if item.get("reason") == _OF_POLICY else reasons.BACKOFF_LIMIT
        kind = "Complete" if item["type"] == "Completed" else "Failed"
        yield {**item, "type": kind, "reason": reason}


def _learner(pods: Iterable[Object], wanted: int) -> list[Object]:
    """Return the one pod that stands for all pods of the learner.

    One that refused its configuration ends all, the others wait for one that has not begun, and the learner has trained
    once all of its pods have.
    """
    standing = list(_newest(pods).values())
    refused = [pod for pod in standing if (terminated(pod, names.ROLE_LEARNER) or {}).get("exitCode") == EXIT_CONFIG]
    waiting = [pod for pod in standing if not begun(pod, names.ROLE_LEARNER)]
    at_work = [pod for pod in standing if not succeeded(pod, names.ROLE_LEARNER)]
    return (refused or waiting or at_work or (standing if len(standing) >= wanted else []))[:1]


def _is_disrupted(pod: Object) -> bool:
    """Return whether something else ended the pod, as an eviction: its Job does not count that either."""
    return (conditions.find(pod.get("status", {}), "DisruptionTarget") or {}).get("status") == "True"


def _servers(observed: Iterable[Object], pods: int, per_pod: int) -> list[Object]:
    """Return one pod with the containers of all rollout pods; none where there is none."""
    of_servers = [pod for pod in observed if role_of(pod) == names.ROLE_ROLLOUT]
    standing = {index: pod for index, pod in _newest(of_servers).items() if index < pods}
    if not standing:
        return []
    last = max(standing.values(), key=_lateness)
    node = next(filter(None, (pod["spec"].get("nodeName") for pod in standing.values())), None)
    containers = [one for index in range(pods) for one in _containers(standing.get(index), index, per_pod)]
    inits = [one for pod in standing.values() for one in pod.get("status", {}).get("initContainerStatuses") or ()]
    status = {"containerStatuses": containers, "initContainerStatuses": inits, "phase": "Running"}
    kept = {name: last.get("status", {}).get(name) or [] for name in ("conditions", "resourceClaimStatuses")}
    spec = {**last["spec"], "nodeName": node}
    return [{"metadata": last["metadata"], "spec": spec, "status": {**status, **kept}}]


def _newest(pods: Iterable[Object]) -> dict[int, Object]:
    """Return the newest pod of each index, in their order; none that is deleted.

    Pods of a role are all in one Job, or alone in one of several.
    """
    found: dict[int, Object] = {}
    for pod in sorted((pod for pod in pods if not terminating(pod)), key=age_rank):
        indexes = [_index(pod, key) for key in (names.LABEL_POD_INDEX, names.LABEL_JOB_INDEX)]
        if None not in indexes:
            found[sum(filter(None, indexes))] = pod
    return dict(sorted(found.items()))


def _index(pod: Object, key: str) -> int | None:
    """Return an index of a pod: 0 where it has none, None where somebody wrote something else into it."""
    written = [marks[key] for part in ("labels", "annotations") if key in (marks := pod["metadata"].get(part) or {})]
    numbers = [int(text) for text in written if _NUMBER.fullmatch(text)]
    return numbers[0] if numbers else None if written else 0


def _containers(pod: Object | None, index: int, per_pod: int) -> Iterable[dict[str, Any]]:
    """Yield the statuses of a pod's containers, with the names that its servers have in the whole job."""
    statuses = (pod or {}).get("status", {}).get("containerStatuses") or []
    of_pod: dict[str, Any] = {POD_UID: pod["metadata"].get("uid")} if pod else {}
    if pod and (stopped := diagnose.stopped(pod, f"rollout pod {index}")):
        of_pod[STOPPED] = stopped
    known = {item["name"]: {**item, **of_pod} for item in statuses}
    for own in range(per_pod):
        item = known.pop(f"server-{own}", None) or {**_WAITS, **of_pod}
        yield {**item, "name": f"server-{index * per_pod + own}"}
    yield from ({**item, "name": f"{name} of rollout pod {index}"} for name, item in known.items())


def _lateness(pod: Object) -> tuple[bool, str]:
    """Return what orders pods by how late they get a node: last those without one, and of these the refused ones."""
    judged = conditions.find(pod.get("status", {}), "PodScheduled") or {}
    return not pod["spec"].get("nodeName"), judged.get("lastTransitionTime") or ""


def looks_again_s(observed: Observed) -> float | None:
    """Return the seconds until something may have changed that no watch shows; None: pods show it."""
    learner = observed.pod(names.ROLE_LEARNER)
    if observed.jobset is None:
        return None
    return QUEUED_S if learner is None else SETTLES_S if ended(learner) else None
