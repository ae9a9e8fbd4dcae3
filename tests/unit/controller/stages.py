"""Jobs in every stage of their lives, as the controller's own plans leave them, and what everybody must say of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from stage2_controller.children import comparison
from stage2_controller.job import names
from stage2_controller.plan import status as statuses
from stage2_controller.plan.result import Plan
from stage2_controller.queue import kueue
from stage2_controller.state import reasons
from stage2_controller.state.conditions import timestamp
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n

CURRENT, IN_PROGRESS, FAILED = "Current", "InProgress", "Failed"  # as kstatus calls them
QUOTA = "exceeded quota: team, limited: pods=0"


class Stage(NamedTuple):
    """A stage: how a job gets there, its phase, the reason that is told, and what kstatus computes."""

    reach: Callable[[], b.Object]
    phase: str
    reason: str
    kstatus: str


def left(raw: b.Object, observed: Observed = b.NOTHING, *, gpus: int = 4, **node: Any) -> b.Object:
    """The job after a pass on a cluster with one node."""
    nodes = n.capacity(n.node(gpus=gpus, **node)).snapshot(n.KEY)
    made = b.plan(raw, observed, settings=replace(b.SETTINGS, nodes_may_come=False), snapshot=nodes)
    return written(raw, made)


def written(raw: b.Object, made: Plan, *refusals: str) -> b.Object:
    """The job once the status of a plan is written, and once the API server has refused these children."""
    status = made.status
    if made.children or refusals:
        status = statuses.with_children_applied(status, raw, refusals, now=b.NOW)
    return {**raw, "status": status}


def beside(*servers: b.Object, learner: b.Object | None = None, **more: Any) -> b.Object:
    """A job whose rollout pod has these containers."""
    pods = (b.pod(names.ROLE_ROLLOUT, *servers), learner or b.waiting_learner_pod())
    return left(b.job(), b.started(b.job(), pods=pods, progress=None, **more))


def answering(learner: b.Object) -> b.Object:
    """A job whose servers answer, beside this container of its learner."""
    return beside(*(b.up(f"server-{index}") for index in range(3)), learner=b.learner_pod(learner))


def trained(**more: Any) -> b.Object:
    """A job that trains; `more` replaces parts of what is observed."""
    return left(b.job(), b.started(b.job(), **more))


def ended(condition: str, reason: str = "", code: int = 0) -> b.Object:
    """A job whose learner's Job has ended."""
    learner = b.learner_job(b.planned(b.job(), b.started(b.job())), b.job_condition(condition, reason))
    return trained(learner=learner, pods=(b.learner_pod(b.down("learner", code, "out of memory")),), progress=None)


def owned(observed: Observed, raw: b.Object) -> b.Object:
    """The job after a pass that asks whose all that is."""
    return left(raw, comparison.owned(observed, raw["metadata"]))


def colocated() -> b.Object:
    """A job whose learner makes its rollouts itself, and has just begun."""
    raw = b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4})
    learner = b.learner_job(b.planned(raw))
    return left(raw, Observed(learner=learner, secret=b.secret(), pods=(b.learner_pod(),)))


def queued() -> b.Object:
    """A job that waits for its quota."""
    raw = b.job()
    raw["metadata"]["labels"] = {kueue.QUEUE_LABEL: "team"}
    return left(raw)


def broken() -> b.Object:
    """A job that trains, with an edit that the controller refuses."""
    return left(b.edited(trained(), learner={"gpus": 2}), b.started(b.job()))


def narrowed() -> b.Object:
    """A job that trains, and that the policy refuses by now."""
    raw = b.job(volumes=[{"name": "data", "mountPath": "/data", "hostPath": {"path": "/nowhere"}}])
    observed, policy = b.started(raw), replace(b.SETTINGS.policy, host_paths=())
    raw = written(raw, b.planned(raw, observed))
    return written(raw, b.plan(raw, observed, settings=replace(b.SETTINGS, policy=policy)))


def refused() -> b.Object:
    """A job of which the API server takes no child."""
    raw = b.job()
    return written(raw, b.planned(raw), f"Service job-3v1-rollout: {QUOTA}")


def bug(raw: b.Object) -> b.Object:
    """The job after a pass that met a bug."""
    return {**raw, "status": statuses.after_bug(raw, AttributeError("x"), b.NOW)}


def drained() -> b.Object:
    """A job whose node somebody has drained a moment ago."""
    raw, (servers, learner) = b.job(), (pending(role) for role in (names.ROLE_ROLLOUT, names.ROLE_LEARNER))
    first = b.plan(raw, b.NOTHING, snapshot=n.capacity(n.node()).snapshot(n.KEY))
    nodes = n.capacity(n.node(unschedulable=True)).snapshot(n.KEY)
    late = b.NOW.replace(second=b.NOW.second + 20)
    return written(raw, b.plan(raw, b.created(first, pods=(servers, learner)), now=late, snapshot=nodes))


def pending(role: str) -> b.Object:
    """A pod that the scheduler refuses."""
    at = {"reason": "Unschedulable", "message": "node(s) were unschedulable", "lastTransitionTime": timestamp(b.NOW)}
    return b.pod(role, node=None, conditions=[{"type": "PodScheduled", "status": "False", **at}])


def again(raw: b.Object) -> b.Object:
    """The job, deleted and applied again."""
    return {**raw, "metadata": {**raw["metadata"], "uid": "uid-of-the-next"}}


def unowned(kind: str) -> Observed:
    """A child that lost its owner."""
    child = b.child(b.planned(b.job()), kind)
    del child["metadata"]["ownerReferences"]
    return Observed(**{kind.lower(): child})


LOADS = [b.up("server-0"), b.up("server-1"), b.up("server-2", ready=False)]
UP = [b.up(f"server-{index}") for index in range(3)]
P, S, R, F = reasons.PENDING, reasons.STARTING, reasons.RUNNING, reasons.FAILED

STAGES: dict[str, Stage] = {
    "refused": Stage(lambda: left(b.job(learner={"gpus": 2})), F, reasons.INVALID_SPEC, FAILED),
    "a bug before its start": Stage(lambda: bug(b.job()), P, reasons.INTERNAL_ERROR, FAILED),
    "no quota": Stage(queued, P, reasons.QUOTA_PENDING, IN_PROGRESS),
    "no room": Stage(lambda: left(b.job(), gpus=3), P, reasons.NO_NODE_FITS, IN_PROGRESS),
    "above a quota": Stage(
        lambda: left(b.job(), Observed(over_quota="needs 4 pods")), P, reasons.QUOTA_EXCEEDED, IN_PROGRESS
    ),
    "a child is refused": Stage(refused, P, reasons.CHILD_REFUSED, IN_PROGRESS),
    "a name is taken": Stage(lambda: owned(unowned("Service"), b.job()), P, reasons.NAME_TAKEN, IN_PROGRESS),
    "applied again": Stage(
        lambda: owned(b.started(b.job()), again(b.job())), P, reasons.OLD_CHILDREN_ENDING, IN_PROGRESS
    ),
    "no pod yet": Stage(lambda: left(b.job()), P, reasons.NOT_CREATED, IN_PROGRESS),
    "no image": Stage(
        lambda: beside(b.waiting("server-0", "ImagePullBackOff", "none")), S, reasons.IMAGE_UNAVAILABLE, IN_PROGRESS
    ),
    "servers load": Stage(lambda: beside(*LOADS), S, reasons.SERVERS_LOADING, IN_PROGRESS),
    "servers crash": Stage(
        lambda: beside(b.waiting("server-0", "CrashLoopBackOff", last=b.ended(1, "no memory"))),
        S,
        reasons.SERVER_CRASHED,
        IN_PROGRESS,
    ),
    "the learner waits": Stage(lambda: beside(*UP), S, reasons.WAITING_FOR_SERVERS, IN_PROGRESS),
    "the learner starts": Stage(
        lambda: answering(b.waiting("learner", "ContainerCreating")), S, reasons.CONTAINERS_STARTING, IN_PROGRESS
    ),
    "the learner retries": Stage(lambda: answering(b.down("learner", 75)), S, reasons.LEARNER_RETRYING, IN_PROGRESS),
    "nothing is pushed": Stage(lambda: answering(b.up("learner")), R, reasons.NOT_SYNCED_YET, CURRENT),
    "no step is done": Stage(colocated, R, reasons.NO_STEP_YET, CURRENT),
    "it trains": Stage(trained, R, reasons.TRAINS, CURRENT),
    "versions differ": Stage(lambda: trained(progress=b.report(held=(4, 3, 4))), R, reasons.VERSIONS_DIFFER, CURRENT),
    "a server fails in mid-run": Stage(
        lambda: beside(*LOADS, learner=b.learner_pod()), R, reasons.SERVERS_LOADING, IN_PROGRESS
    ),
    "no report comes": Stage(
        lambda: trained(progress=None, unreachable="timed out"), R, reasons.LEARNER_UNREACHABLE, IN_PROGRESS
    ),
    "its Secret is gone": Stage(lambda: trained(secret=None), R, reasons.SECRET_RENEWED, IN_PROGRESS),
    "a refused edit": Stage(broken, R, reasons.INVALID_SPEC, FAILED),
    "a bug in mid-run": Stage(lambda: bug(trained()), R, reasons.INTERNAL_ERROR, FAILED),
    "a narrower policy": Stage(narrowed, R, reasons.TRAINS, CURRENT),
    "its node is drained": Stage(drained, P, reasons.NODE_DRAINED, IN_PROGRESS),
    "about to be suspended": Stage(
        lambda: left(b.edited(trained(), suspend=True), b.started(b.job())),
        reasons.SUSPENDED,
        reasons.PODS_ENDING,
        IN_PROGRESS,
    ),
    "suspended": Stage(lambda: left(b.job(suspend=True)), reasons.SUSPENDED, reasons.SUSPENDED_BY_SPEC, CURRENT),
    "succeeded": Stage(lambda: ended("Complete"), reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED, CURRENT),
    "failed": Stage(lambda: ended("Failed", reasons.BACKOFF_LIMIT, 1), F, reasons.BACKOFF_LIMIT, FAILED),
}
