"""What the learner's report adds to a job's status: steps, loss, and which weights each server holds. Pure.

A report belongs to the pod that gave it. While that pod does not answer, its last report stays in the status; once it
is gone, nothing that it said counts any more. A job that has ended keeps the figures of its last learner.

A server is known by its pod's uid and the restarts of its container. The learner knows it by its address alone, and
what it reported of the process before says nothing of the present one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_api.pod.report import LearnerReport
from stage2_controller.children import manifest
from stage2_controller.job import kinds, names, output_folder
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.state import diagnose, reasons
from stage2_controller.state.conditions import Condition, find, truth
from stage2_controller.state.observed import POD_UID, Object, runs, terminating

_KEPT = ("step", "maxSteps", "sync", "reproducibility", "loss", "tokensPerSecond", "bestStep", "bestScore")
Server = dict[str, Any]

_RELEASED = "the job ended: its servers were removed"


# --- The figures of the learner.


@dataclass(frozen=True)
class Report:
    """The figures of the learner's present pod.

    pod: its uid, which the next pass compares; now: the newest figures; before: those that the last pass wrote.
    furthest: the step that any learner of this spec has reached.
    """

    pod: str | None
    now: Mapping[str, Any]
    before: Mapping[str, Any]
    furthest: int

    def status(self) -> dict[str, Any]:
        """Return the part of the status that is reported. Absent figures are None."""
        return {
            "learnerPod": self.pod,
            **{key: _without_nulls(self.now.get(key)) for key in ("step", "maxSteps", "sync", "reproducibility")},
            "furthestStep": self.furthest or None,
            "progress": self._progress(),
            "loss": _finite(self.now.get("loss")),
            "tokensPerSecond": _finite(self.now.get("tokensPerSecond")),
            "bestStep": self.now.get("bestStep"),
            "bestScore": _finite(self.now.get("bestScore")),
        }

    def _progress(self) -> str | None:
        done, all_steps = self.now.get("step"), self.now.get("maxSteps")
        return f"{done}/{all_steps}" if all_steps else None


def report_of(job: JobPass, *, end: Condition | None) -> Report:
    """Return the figures of the learner's present pod, or of the last one where the job has ended."""
    learner, uid = job.observed.report(), _learner_pod(job)
    if end:
        uid = uid or job.previous.get("learnerPod")
    is_same = end or is_of_last_pod(job)
    before = {key: job.previous[key] for key in _KEPT if key in job.previous} if is_same else {}
    now = {**before, **(learner.reported() if learner else {})}
    return Report(uid, now, before, max(now.get("step") or 0, furthest_step(job)))


def is_of_last_pod(job: JobPass) -> bool:
    """Return whether the learner has the pod that it had in the last pass; older controllers named none."""
    uid = _learner_pod(job)
    return uid is not None and job.previous.get("learnerPod") in (uid, None)


def _learner_pod(job: JobPass) -> str | None:
    pod = job.observed.pod(names.ROLE_LEARNER)
    uid: str | None = pod["metadata"].get("uid") if pod else None
    return uid


def furthest_step(job: JobPass) -> int:
    """Return the last known step of a learner of this spec; an edited run restarts."""
    previous = job.previous
    if previous.get("specHash") != job.parsed.spec_hash:
        return 0
    reached: int = max(previous.get("furthestStep") or 0, previous.get("step") or 0)  # older controllers have no first
    return reached


def steps_kept(job: JobPass, report: Report) -> Condition | None:
    """Return the condition StepsKept while steps have to be done again; None where none are lost."""
    learner = job.observed.report()
    begun = learner.resumed_step if learner else None
    if begun is None:  # it is not known, or not known any more
        lost = find(job.previous, reasons.STEPS_KEPT) if report.before else None
        return Condition(reasons.STEPS_KEPT, "False", reasons.STEPS_LOST, lost["message"]) if lost else None
    if max(begun, report.now.get("step") or 0) >= report.furthest:
        return None
    where = output_folder.fleeting(job.parsed.job)
    if begun:
        why = ", the newest checkpoint"
    elif where:
        why = f": {where}; {output_folder.WAY_OUT}"
    else:
        why = f": it found no checkpoint in training.output_dir {job.spec.config.training.output_dir}"
    count = report.furthest - begun
    message = (
        f"{count} step{'s are' if count > 1 else ' is'} lost: a learner had done step {report.furthest}, and this one"
        f" began at step {begun}{why}"
    )
    return Condition(reasons.STEPS_KEPT, "False", reasons.STEPS_LOST, message)


def _without_nulls(value: Any) -> Any:
    """Return a reported value without null keys, which the status's schema refuses."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


def _finite(figure: float | None) -> float | None:
    """Return a finite figure or None: JSON has no infinity, and a NaN, which never equals itself, would be rewritten in
    every pass."""
    return figure if figure is not None and math.isfinite(figure) else None


# --- The servers.


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
