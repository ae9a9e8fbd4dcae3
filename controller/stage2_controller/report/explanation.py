"""What a job's conditions mean to a person: why it does not train, with the object and field to change, and events.

`status.message`, the reason of the condition Training (which a column of kubectl shows) and `stage2 job explain` report
the same link: the first that is missing. `stage2 job explain` prints the whole chain. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from stage2_controller.job import names
from stage2_controller.job.objects import value_at
from stage2_controller.state import conditions, reasons
from stage2_controller.state.conditions import Condition, truth

State = Literal["ok", "waits", "wrong"]

# The conditions from the spec to the first step, in the order in which they become true.
CHAIN = (
    ("spec", reasons.ACCEPTED),
    ("suspension", reasons.SUSPENDED),
    ("quota", reasons.QUOTA_RESERVED),
    ("placement", reasons.PLACED),
    ("children", reasons.CHILDREN_APPLIED),
    ("servers", reasons.ROLLOUT_READY),
    ("learner", reasons.LEARNER_RUNNING),
    ("reports", reasons.LEARNER_REACHABLE),
    ("weights", reasons.WEIGHTS_IN_SYNC),
)

_WORK = ("weights", "steps")  # links that a learner at work completes by itself

# Reasons that pass without anybody's help, and the command that shows the progress.
_PATIENCE = {
    reasons.NOT_CREATED: "kubectl describe {parents}",
    reasons.CONTAINERS_STARTING: "kubectl describe pods -l {label}={short}",
    reasons.SERVERS_LOADING: "kubectl logs {servers} --all-containers --prefix",
    reasons.WAITING_FOR_SERVERS: "",
    reasons.SECRET_RENEWED: "kubectl get pods -l {label}={short}",
    reasons.PODS_ENDING: "kubectl get pods -l {label}={short}",
    reasons.OLD_LEARNER_ENDING: "kubectl get pods -l {label}={short}",
    reasons.OLD_CHILDREN_ENDING: "kubectl get all,configmaps,secrets,networkpolicies -l {label}={short}",
    reasons.NOT_SYNCED_YET: "kubectl logs job/{learner}",
    reasons.SERVER_RESTARTED: "kubectl logs {servers} --all-containers --previous",
    reasons.NODE_LOST: "",
    reasons.NODE_FULL: "",
    reasons.NODE_DRAINED: "",
    reasons.HALF_PLACED: "kubectl describe pods -l {label}={short}; kubectl describe {parent}",
    reasons.CHECK_FAILED: "kubectl describe {workload}",
    reasons.QUOTA_PENDING: "kubectl describe {workload}; the label kueue.x-k8s.io/queue-name of rmj/{job}",
}  # fmt: skip

# Reasons that somebody has to act on, and what to change.
_FIXES = {
    reasons.INVALID_SPEC: "the field that the message names, in rmj/{job}",
    reasons.NO_LONGER_VALID: "the field that the message names, in rmj/{job}, or the chart's values under policy",
    reasons.INTERNAL_ERROR: "the traceback in the controller's log; kubectl get rmj {job} -o yaml for the report",
    reasons.SUSPENDED_BY_SPEC: "spec.suspend of rmj/{job}",
    reasons.QUOTA_REFUSED: "spec.suspend of rmj/{job}: true, and false again once what the message names is fixed",
    reasons.WORKLOAD_INACTIVE: "spec.active of workload/{quota}",
    reasons.NO_PRIORITY_CLASS: "the label kueue.x-k8s.io/priority-class of rmj/{job}",
    reasons.KUEUE_DISABLED: "controller.kueue of the chart, or the label kueue.x-k8s.io/queue-name of rmj/{job}",
    reasons.NO_NODE_FITS: "spec.placement, spec.rollout and spec.learner of rmj/{job}; or add a node, or free one",
    reasons.QUOTA_EXCEEDED: "the ResourceQuota that the message names; spec.rollout and spec.learner of rmj/{job}",
    reasons.NODE_NOT_READY: "node/{node}",
    reasons.CHILD_REFUSED: "the ResourceQuota or policy that the message names, in namespace {namespace}",
    reasons.JOBSET_MISSING: "the command that the message names; or a new job without spec.engine",
    reasons.NAME_TAKEN: "metadata.name of rmj/{job}, or the object that the message names, in namespace {namespace}",
    reasons.LABELS_LOST: "the command that the message names",
    reasons.POD_REFUSED: "the ResourceQuota or policy that the message names, in namespace {namespace}",
    reasons.QUEUED_TWICE: "integrations.externalFrameworks of Kueue's configuration",
    reasons.UNSCHEDULABLE: "spec.placement of rmj/{job}, or the pod's volumes (spec.volumes)",
    reasons.EVICTED: "spec.rollout.resources and spec.learner.resources of rmj/{job}; kubectl describe nodes",
    reasons.IMAGE_UNAVAILABLE: "{images}, or spec.imagePullSecrets of rmj/{job}",
    reasons.CONTAINER_CONFIG: "the object that the message names; spec.volumes of rmj/{job}",
    reasons.SERVER_CRASHED: "spec.config.custom.extra.rollout_matching.vllm or spec.rollout.resources of rmj/{job}; "
    "kubectl logs {servers} --all-containers --previous",
    reasons.LEARNER_RETRYING: "spec.config of rmj/{job}; kubectl logs job/{learner}",
    reasons.LEARNER_UNREACHABLE: "kubectl logs job/{learner}; NetworkPolicies of namespace {namespace}",
    reasons.VERSIONS_DIFFER: "kubectl logs job/{learner}; the next sync brings the servers to one version",
    reasons.PODS_OVERDUE: "the pod that the message names",
    reasons.STEPS_LOST: "spec.volumes of rmj/{job}; kubectl logs job/{learner}",
    reasons.CONFIGURATION_ERROR: "spec.config of rmj/{job}: it runs again once the corrected file is applied",
    reasons.BACKOFF_LIMIT: "spec.config or spec.learner.backoffLimit of rmj/{job}; kubectl logs job/{learner}",
    reasons.EVICTED_TOO_OFTEN: "spec.rollout.resources, spec.learner.resources or spec.evictionLimit of rmj/{job}",
    reasons.DEADLINE_EXCEEDED: "spec.activeDeadlineSeconds of rmj/{job}: it runs again with a larger one, or with none",
    reasons.START_DEADLINE: "what the message names: then kubectl delete rmj {job}, and apply it again; or "
    "spec.learner.startDeadlineSeconds of rmj/{job}: it runs again with another one",
    reasons.LEARNER_FAILED: "kubectl describe {parent}",
}


@dataclass(frozen=True)
class Step:
    """One link of the chain."""

    name: str
    state: State
    reason: str
    message: str
    fix: str  # the object and field to change, or the command that shows more; may be empty


def chain(job: Mapping[str, Any]) -> list[Step]:
    """Return every link that the job's status has, in order; the first that is not ok is why the job does not train."""
    status = job.get("status") or {}
    known = {item["type"]: item for item in status.get("conditions") or []}
    links = [_step(name, known[kind], job) for name, kind in CHAIN if kind in known]
    end = known.get(reasons.FAILED) or known.get(reasons.SUCCEEDED)
    if end:
        state: State = "ok" if end["type"] == reasons.SUCCEEDED else "wrong"
        stuck = f"; {known[reasons.PODS_ENDED]['message']}" if reasons.PODS_ENDED in known else ""
        return [*links[:1], Step("outcome", state, end["reason"], end["message"] + stuck, _fix(end["reason"], job))]
    return [_with_learner(link, known.get(reasons.LEARNER_RUNNING)) for link in (*links, _last_step(status))]


def first(steps: Sequence[Step]) -> Step:
    """Return the first link that is not ok, or else the last: the one that is reported."""
    return next((step for step in steps if step.state != "ok"), steps[-1])


SUMMARY = (reasons.TRAINING, reasons.READY, reasons.RECONCILING, reasons.STALLED)


def summary(link: Step, *, trained: bool) -> list[Condition]:
    """Return the conditions that follow from the first missing link: Training, Ready, and Reconciling or Stalled.

    A job is ready as soon as servers and learner run: nobody waits days for the end of a training. trained: it trained
    before a spec that is refused, or a bug; then its pods continue.
    """
    see = f"; see: {link.fix}" if link.fix else ""
    trains = trained or link.reason == reasons.TRAINS
    ready = link.state == "ok" or link.name in _WORK or link.reason == reasons.SUSPENDED_BY_SPEC
    found = [
        Condition(reasons.TRAINING, truth(trains), link.reason, f"{link.name}: {link.message}{see}"),
        Condition(reasons.READY, truth(ready), link.reason, link.message),
    ]
    if not ready:
        kind = reasons.STALLED if link.name in ("spec", "outcome") else reasons.RECONCILING
        found.append(Condition(kind, "True", link.reason, link.message))
    return found


def _step(name: str, condition: Mapping[str, Any], job: Mapping[str, Any]) -> Step:
    reason = condition["reason"]
    holds = condition["status"] == "True" and reason != reasons.SUSPENDED_BY_SPEC
    if holds:
        return Step(name, "ok", reason, condition["message"], "")
    state: State = "waits" if reason in _PATIENCE else "wrong"
    return Step(name, state, reason, condition["message"], _fix(reason, job, condition["message"]))


def _with_learner(link: Step, learner: Mapping[str, Any] | None) -> Step:
    """Return a link that waits for a learner which loads, with what the learner reports to be doing."""
    waits = link.reason in (reasons.NOT_SYNCED_YET, reasons.NO_STEP_YET)
    if not waits or learner is None or learner["status"] != "True" or ": " not in learner["message"]:
        return link
    return replace(link, message=f"{link.message}; {learner['message']}")


def _last_step(status: Mapping[str, Any]) -> Step:
    done, of = status.get("step"), status.get("maxSteps")
    kept = conditions.find(status, reasons.STEPS_KEPT)
    lost = f"; {kept['message']}" if kept else ""
    if not done:
        return Step("steps", "waits", reasons.NO_STEP_YET, f"no optimizer step is done yet{lost}", "")
    loss = f", loss {status['loss']:.4g}" if status.get("loss") is not None else ""
    pushed = _pushed(status.get("sync") or {})
    speed = f", {status['tokensPerSecond']:,.0f} tokens/s" if status.get("tokensPerSecond") else ""
    return Step("steps", "ok", reasons.TRAINS, f"step {done} of {of}{loss}{speed}{pushed}{lost}", "")


def _pushed(sync: Mapping[str, Any]) -> str:
    """Return how the last weights were pushed, as far as the learner reported it."""
    if not sync.get("seconds"):
        return ""
    how = f" over {sync['transport']}" if sync.get("transport") else ""
    fast = f" at {sync['gigabytesPerSecond']:.2g} GB/s" if sync.get("gigabytesPerSecond") else ""
    reason = f" ({sync['mergeReason']})" if sync.get("mergeReason") else ""
    merged = f", adapters merged at the {sync['merge']}{reason}" if sync.get("merge") else ""
    return f"; weights of step {sync['version']} pushed in {sync['seconds']:.2g} s{how}{fast}{merged}"


def _fix(reason: str, job: Mapping[str, Any], message: str = "") -> str:
    metadata, status = job["metadata"], job.get("status") or {}
    text = _FIXES.get(reason) or _PATIENCE.get(reason) or ""
    return text.format(
        **_objects(job),
        job=metadata["name"],
        short=names.short_name(metadata["name"]),
        label=names.LABEL_JOB,
        namespace=metadata.get("namespace", "default"),
        node=status.get("node", ""),
        images=_fields_of_image(job, message),
    )


def _fields_of_image(job: Mapping[str, Any], message: str) -> str:
    """Return the fields that name the image in a message: of a template, else the job's, else the chart's."""
    named = [
        f"spec.{role}.template.spec.{key}[{one['name']}].image"
        for role in ("rollout", "learner")
        for key in ("containers", "initContainers")
        for one in _listed(value_at(job, "spec", role, "template", "spec", key))
        if one.get("image") and f"{one['image']} " in message
    ]
    own = "spec.image" if value_at(job, "spec", "image") else "spec.image, or image.trainer of the chart"
    return ", ".join(named) or own


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping) and "name" in one] if isinstance(value, list) else []


def _objects(job: Mapping[str, Any]) -> dict[str, str]:
    """Return what kubectl calls the objects that have the job's pods, and its quota."""
    roles = names.ROLE_ROLLOUT, names.ROLE_LEARNER, names.ROLE_QUOTA, names.ROLE_JOBSET
    rollout, learner, quota, jobset = (names.child_name(job["metadata"]["name"], role) for role in roles)
    if names.runs_as_jobset(job):
        short, label = names.short_name(job["metadata"]["name"]), names.LABEL_JOB
        servers = f"-l {label}={short},{names.LABEL_ROLE}={names.ROLE_ROLLOUT}"
        of_pods = {"parent": f"jobset/{jobset}", "parents": f"jobset/{jobset}", "servers": servers}
        return {**of_pods, "learner": f"{jobset}-{names.ROLE_LEARNER}-0", "workload": "workloads", "quota": quota}
    parent, servers = f"job/{learner}", f"deployment/{rollout}"
    parents = f"{parent} {servers}" if value_at(job, "spec", "rollout", "servers") else parent
    of_pods = {"parent": parent, "parents": parents, "servers": servers}
    return {**of_pods, "learner": learner, "workload": f"workload {quota}", "quota": quota}


# Reasons without an event: nothing happened, or it happens in every run.
_QUIET = {
    reasons.VALID, reasons.APPLIED, reasons.NOT_CREATED, reasons.CONTAINERS_STARTING, reasons.WAITING_FOR_SERVERS,
    reasons.OLD_LEARNER_ENDING, reasons.QUOTA_PENDING, reasons.LEARNER_FINISHED, reasons.RELEASED,
    reasons.NOT_SYNCED_YET, reasons.NO_STEP_YET, reasons.TRAINS,
}  # fmt: skip
# What somebody has to act on, unless they chose it themselves, and what costs a running job its place.
_LOSSES = {reasons.CHECK_FAILED, reasons.NODE_LOST, reasons.NODE_FULL, reasons.NODE_DRAINED, reasons.HALF_PLACED}
_WARNINGS = (_FIXES.keys() | _LOSSES) - {reasons.SUSPENDED_BY_SPEC}


class Event(NamedTuple):
    """One event for `kubectl describe`."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def events(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Event]:
    """Return an event for each condition whose status or reason is new and worth attention, each reason once."""
    found: dict[str, Event] = {}
    if (current.get("evictions") or 0) > (previous.get("evictions") or 0):
        found[reasons.EVICTED] = Event("Warning", reasons.EVICTED, current["lastEviction"])
    for item in current.get("conditions") or []:
        old = conditions.find(previous, item["type"])
        unchanged = old is not None and (old["status"], old["reason"]) == (item["status"], item["reason"])
        if not unchanged and item["reason"] not in _QUIET and item["type"] not in SUMMARY:
            kind: Literal["Normal", "Warning"] = "Warning" if item["reason"] in _WARNINGS else "Normal"
            found.setdefault(item["reason"], Event(kind, item["reason"], item["message"]))
    return list(found.values())
