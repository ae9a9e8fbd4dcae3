"""The rollout servers in a job's status: which answer, and which weights each was proved to hold. Pure.

A server is known by its pod's uid and the restarts of its container. The learner knows it by its address alone, and
what it reported of the process before says nothing of the present one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from stage2_api.pod.report import LearnerReport
from stage2_controller.children import manifest
from stage2_controller.job import kinds, names
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.state import diagnose, reasons
from stage2_controller.state.conditions import Condition, truth
from stage2_controller.state.observed import POD_UID, Object, runs, terminating

Server = dict[str, Any]

_RELEASED = "the job ended: its servers were removed"


def servers(job: JobPass, sync: Mapping[str, Any], *, end: Condition | None) -> list[Server]:
    """Return the status of each server. sync: the learner's last report of its pushes."""
    if not job.parsed.processes.servers:
        return []
    containers = _containers(job, end=end)
    addresses = [address.base_url for address in job.parsed.processes.addresses]
    versions = {_host_and_port(item["baseUrl"]): item["version"] for item in sync.get("servers") or []}
    before = {item["name"]: item for item in job.previous.get("servers") or []}
    pushed = _pushed_since(job.observed.baseline, sync)
    found = []
    for name, url in zip(job.server_names, addresses, strict=True):
        container = containers.get(name, {})
        server, version = _server(name, url, container), versions.get(_host_and_port(url))
        if version is not None and runs(container) and (pushed or _held_before(server, before.get(name))):
            server["version"] = version
        elif version is not None:
            server["ready"] = False
        found.append(server)
    return found


def summary(job: JobPass, *, end: Condition | None) -> dict[str, Any]:
    """Return how many servers are ready, and what the scale subresource reads; nothing for a job without servers."""
    wanted = job.server_names
    if not wanted:
        return {}
    containers = _containers(job, end=end)
    ready = sum(bool(containers.get(name, {}).get("ready")) for name in wanted)
    there = not end and job.observed.pod(names.ROLE_ROLLOUT) is not None
    labels = manifest.selector(job.parsed.owner.name, names.ROLE_ROLLOUT).items()
    return {
        "rollout": f"{ready}/{len(wanted)}",
        "replicas": there * len(wanted),
        "selector": ",".join(f"{key}={one}" for key, one in labels),
    }


def rollout_ready(job: JobPass, *, end: Condition | None) -> Condition:
    """Return the condition RolloutReady."""
    if end:
        return Condition(reasons.ROLLOUT_READY, "False", reasons.RELEASED, _RELEASED)
    observed, wanted = job.observed, job.server_names
    finding = diagnose.servers(observed.pod(names.ROLE_ROLLOUT), wanted, observed.deployment)
    finding = lost_labels(job, names.ROLE_ROLLOUT, reasons.ROLLOUT_READY) or finding
    if finding:
        return Condition(reasons.ROLLOUT_READY, "False", finding.reason, finding.message)
    return Condition(reasons.ROLLOUT_READY, "True", reasons.SERVERS_READY, f"all {len(wanted)} servers answer")


def lost_labels(job: JobPass, role: str, kind: str) -> diagnose.Finding | None:
    """Return that a role's pod, which ran in the last pass by the condition `kind`, has lost its labels."""
    parent, known = job.observed.child(kinds.KIND_OF_ROLE[role]), diagnose.was_seen(job.previous, kind)
    return diagnose.unseen(parent, role) if parent and known and job.observed.unseen(role) else None


def weights_in_sync(listed: Sequence[Server], sync: Mapping[str, Any] | None, *, end: Condition | None) -> Condition:
    """Return the condition WeightsInSync.

    listed: the servers' status; sync: the learner's last report of its pushes.
    """

    def condition(status: bool, reason: str, message: str) -> Condition:
        return Condition(reasons.WEIGHTS_IN_SYNC, truth(status), reason, message)

    if end:
        return condition(False, reasons.RELEASED, _RELEASED)
    held = [item["version"] for item in (sync or {}).get("servers") or []]
    if sync is None or not held:
        return condition(False, reasons.NOT_SYNCED_YET, "the learner has not pushed its weights yet")
    if unproved := [item["name"] for item in listed if "version" not in item]:
        hold = "holds" if len(unproved) == 1 else "hold"
        why = "a server that starts anew has none, and one that does not run"
        message = f"{', '.join(unproved)} {hold} no weights of the learner until its next push: {why}"
        return condition(False, reasons.SERVER_RESTARTED, message)
    pushed, count = sync["version"], len(listed)
    if behind := [str(version) for version in held if version != pushed]:
        message = f"the learner pushed version {pushed}; {len(behind)} of {count} servers hold {', '.join(behind)}"
        return condition(False, reasons.VERSIONS_DIFFER, message)
    return condition(True, reasons.SAME_VERSION, f"all {count} servers hold version {pushed}")


def _containers(job: JobPass, *, end: Condition | None) -> dict[str, Object]:
    """Return the containers of the rollout pod by name, each with its pod's uid."""
    # A job that is done has released its servers.
    pod = None if end else job.observed.pod(names.ROLE_ROLLOUT)
    if pod is None or terminating(pod):
        return {}
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return {item["name"]: {POD_UID: pod["metadata"].get("uid"), **item} for item in statuses}


def _server(name: str, url: str, container: Object) -> Server:
    server = {
        "name": name,
        "baseUrl": url,
        "ready": bool(container.get("ready")),
        "restarts": container.get("restartCount", 0),
    }
    uid = container.get(POD_UID)
    return {**server, "pod": uid} if uid else server


def _held_before(server: Server, before: Mapping[str, Any] | None) -> bool:
    """Return whether the same process held weights in the last pass. Older controllers wrote no pod."""
    if before is None or "version" not in before:
        return False
    of_pod, restarts = before.get("pod", server["pod"]), before.get("restarts", 0)
    return bool((of_pod, restarts) == (server["pod"], server["restarts"]))


def _pushed_since(baseline: LearnerReport | None, sync: Mapping[str, Any]) -> bool:
    """Return whether a push has ended since this report, and so reached the processes that ran before it.

    A push that the baseline itself has may have gone to earlier processes.
    """
    return baseline is not None and _push_of(sync) != _push_of(baseline.reported().get("sync") or {})


def _push_of(sync: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return what tells a push from the one before; older learners did not count them."""
    return sync.get("version"), sync.get("pushes")


def _host_and_port(base_url: str) -> str:
    """Return host and port without the scheme, which differs for pods from before jobs had certificates."""
    return base_url.partition("://")[2]
