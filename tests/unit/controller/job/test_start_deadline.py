"""The time to start bounds every way of not starting: GPUs are not held for ever by a job that cannot train."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller.job.test_evictions import observed_jobset
from tests.unit.controller.job.test_jobset import SHARDED
from tests.unit.controller.job.test_jobset import job as jobset_job
from tests.unit.controller.job.test_replaced_pods import another, leaving

LIMIT = {"startDeadlineSeconds": 60}
DAY_S = 86_400.0
NO_IMAGE = "ImagePullBackOff"


def beside_servers(learner: b.Object, **more: Any) -> Observed:
    """What is observed of a job whose servers answer, beside this pod of its learner."""
    pods = (b.rollout_pod(True, True, True), learner)
    return b.started(b.job(learner={"gpus": 1, **LIMIT}), pods=pods, progress=None, **more)


def init(container: b.Object, *others: b.Object) -> b.Object:
    """The learner's pod with an init container in this state."""
    learner = b.waiting("learner", "PodInitializing")
    return b.pod(names.ROLE_LEARNER, learner, *others, initContainerStatuses=[container])


def loading(*servers: b.Object, inits: tuple[b.Object, ...] = ()) -> Observed:
    rollout = b.pod(names.ROLE_ROLLOUT, *servers, initContainerStatuses=list(inits))
    pods = (rollout, b.waiting_learner_pod())
    return b.started(b.job(learner={"gpus": 1, **LIMIT}), pods=pods, progress=None)


WAITING = [b.waiting(f"server-{index}", "PodInitializing") for index in range(3)]
UP = [b.up(f"server-{index}") for index in range(3)]
# What is observed, and words of what is lacking.
WAYS: dict[str, tuple[Callable[[], Observed], str]] = {
    "the learner's image is missing": (
        lambda: beside_servers(b.learner_pod(b.waiting("learner", NO_IMAGE, "no such image"))),
        "no such image",
    ),
    "the image of the first container is missing": (
        lambda: beside_servers(init(b.waiting(names.WAIT_CONTAINER, NO_IMAGE, "none of that name"))),
        "none of that name",
    ),
    "an added container's image is missing": (
        lambda: beside_servers(init(b.waiting("download", NO_IMAGE, "no download"))),
        "no download",
    ),
    "a Secret of the learner is missing": (
        lambda: beside_servers(b.learner_pod(b.waiting("learner", "CreateContainerConfigError", "no such secret"))),
        "no such secret",
    ),
    "an added container does not end": (lambda: beside_servers(init(b.up("download"))), "waits for its download"),
    "the first container waits for ever": (lambda: beside_servers(b.waiting_learner_pod()), "its wait-for-servers"),
    "the learner has no pod": (
        lambda: replace(beside_servers(b.learner_pod()), pods=(b.rollout_pod(True, True, True),)),
        "does not exist",
    ),
    "a server's image is missing": (
        lambda: loading(*UP[:2], b.waiting("server-2", NO_IMAGE, "no server")), "no server",
    ),
    "an added container beside the servers has no image": (
        lambda: loading(*WAITING, inits=(b.waiting("warm", NO_IMAGE, "no warm"),)),
        "no warm",
    ),
    "a server crashes again and again": (
        lambda: loading(*UP[:2], b.waiting("server-2", "CrashLoopBackOff", last=b.ended(1, "no memory"))),
        "no memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_job_missing_start_deadline_fails_with_reason(way: str) -> None:
    observe, words = WAYS[way]
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), observe()
    raw = b.with_status(raw, b.planned(raw, seen))
    before = b.planned(raw, seen, after_s=59)
    assert b.condition(before, reasons.FAILED) is None
    assert before.again_after_s == 1
    made = b.planned(raw, seen, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    message = b.message(made, reasons.FAILED)
    assert words in message
    assert "60 s after the job had a node (spec.learner.startDeadlineSeconds)" in message
    assert set(made.deletions) == {"Deployment", "Job"}, "their GPUs are free"


def colocated(*learner: b.Object, limit_s: int = 60) -> tuple[b.Object, Observed]:
    raw = b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4, "startDeadlineSeconds": limit_s})
    return raw, Observed(learner=b.learner_job(b.planned(raw)), secret=b.secret(), pods=learner)


@pytest.mark.parametrize(
    "learner",
    [b.learner_pod(b.waiting("learner", NO_IMAGE, "no such image")), init(b.waiting("download", NO_IMAGE))],
    ids=["its own image", "an added container's"],
)
def test_colocated_learner_without_image_fails_at_start_deadline(learner: b.Object) -> None:
    """It held its GPUs without end."""
    raw, seen = colocated(learner)
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=59), reasons.FAILED) is None
    made = b.planned(raw, seen, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert made.deletions == ("Job",)


def test_admin_policy_caps_start_deadline_of_colocated_job() -> None:
    raw, seen = colocated(b.learner_pod(b.waiting("learner", NO_IMAGE)), limit_s=7200)
    settings = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, longest_start_seconds=60))
    raw = b.with_status(raw, b.plan(raw, seen, settings=settings))
    made = b.plan(raw, seen, settings=settings, now=b.NOW + timedelta(seconds=60))
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_start_deadline_does_not_run_while_colocated_job_has_no_pod_on_node() -> None:
    raw, seen = colocated(b.pod(names.ROLE_LEARNER, node=None))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None
    raw, seen = colocated()
    seen = replace(seen, learner_refused="exceeded quota")
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None


def test_servers_ready_for_moment_do_not_restart_start_deadline() -> None:
    raw, slow = b.job(learner={"gpus": 1, **LIMIT}), loading(*UP[:2], b.up("server-2", ready=False))
    waits = beside_servers(b.waiting_learner_pod())
    for at_s, seen in ((0, slow), (20, waits), (40, slow), (59, waits)):
        made = b.planned(raw, seen, after_s=at_s)
        assert b.condition(made, reasons.FAILED) is None
        raw = b.with_status(raw, made)
    assert b.condition(b.planned(raw, slow, after_s=60), reasons.FAILED) == ("True", reasons.START_DEADLINE)


@pytest.mark.parametrize(
    "learner",
    [b.learner_pod(), b.learner_pod(b.down("learner", 75)), b.learner_pod(b.waiting("learner", "X", last=b.ended(1)))],
    ids=["runs", "has ended", "is started again"],
)
def test_start_deadline_ends_once_learner_container_has_run(learner: b.Object) -> None:
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(learner)
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None


def test_start_deadline_restarts_for_learner_in_new_pod() -> None:
    raw = b.job(learner={"gpus": 1, **LIMIT})
    raw = b.with_status(raw, b.planned(raw, b.started(raw)))
    next_one = another(b.learner_pod(b.waiting("learner", NO_IMAGE, "gone from the registry")))
    seen = beside_servers(next_one)
    made = b.planned(raw, seen, after_s=DAY_S)
    assert b.condition(made, reasons.FAILED) is None
    raw = b.with_status(raw, made)
    assert b.condition(b.planned(raw, seen, after_s=DAY_S + 59), reasons.FAILED) is None
    late = b.planned(raw, seen, after_s=DAY_S + 60)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert "gone from the registry" in b.message(late, reasons.FAILED)


def test_start_deadline_counts_from_when_last_pod_got_its_node() -> None:
    raw = b.job(learner={"gpus": 1, **LIMIT})
    learner = another(b.learner_pod(b.waiting("learner", NO_IMAGE)))
    at = conditions.timestamp(b.NOW + timedelta(seconds=600))
    learner["status"] = {
        **learner["status"],
        "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": at}],
    }
    raw = b.with_status(raw, b.planned(raw, beside_servers(b.waiting_learner_pod())))
    seen = beside_servers(learner)
    assert b.condition(b.planned(raw, seen, after_s=659), reasons.FAILED) is None
    assert b.condition(b.planned(raw, seen, after_s=660), reasons.FAILED) == ("True", reasons.START_DEADLINE)


UNLABELLED = {"status": {"active": 1, "ready": 1}}


@pytest.mark.parametrize("kind", ["beside servers", "colocate"])
def test_unlabelled_learner_pod_fails_at_start_deadline(kind: str) -> None:
    """A webhook keeps them from it: nothing was known of the pod, and its job held its GPUs without end."""
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(b.learner_pod())
    seen = replace(seen, pods=(b.rollout_pod(True, True, True),))
    if kind == "colocate":
        raw, seen = colocated()
    seen = replace(seen, learner={**(seen.learner or {}), **UNLABELLED})
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=59), reasons.FAILED) is None
    made = b.planned(raw, seen, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert "kubectl label pods" in b.message(made, reasons.FAILED)


def test_learner_losing_labels_while_waiting_fails_at_start_deadline() -> None:
    raw, waits = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(b.waiting_learner_pod())
    raw = b.with_status(raw, b.planned(raw, waits))
    lost = replace(waits, pods=waits.pods[:1], learner={**(waits.learner or {}), **UNLABELLED})
    for at_s in (20, 40):
        made = b.planned(raw, lost, after_s=at_s)
        assert b.condition(made, reasons.FAILED) is None
        raw = b.with_status(raw, made)
    assert b.condition(b.planned(raw, lost, after_s=60), reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_servers_waiting_beside_orphaned_learner_fail_at_start_deadline() -> None:
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(b.learner_pod())
    orphan = b.learner_pod()
    seen = replace(seen, learner=None, pods=seen.pods[:1], orphans=(orphan,))
    raw = b.with_status(raw, b.planned(raw, seen))
    before = b.planned(raw, seen, after_s=59)
    assert (b.condition(before, reasons.FAILED), before.again_after_s) == (None, 1)
    made = b.planned(raw, seen, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert "kubectl delete pod job-3v1-learner-x -n team-a" in b.message(made, reasons.FAILED)
    assert made.deletions == ("Deployment",)


def test_terminating_old_learner_does_not_consume_start_deadline() -> None:
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(b.learner_pod())
    seen = replace(seen, learner=None, pods=(seen.pods[0], leaving(b.learner_pod())))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=100), reasons.FAILED) is None


REFUSED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
SCHEDULED = {"type": "PodScheduled", "status": "True"}


def of_index(pod: b.Object, number: int, *, bound_s: float | None = 0) -> b.Object:
    """A pod of a JobSet that got its node then; None: it has none."""
    made = another(pod, number)
    labels = {**made["metadata"]["labels"], names.LABEL_POD_INDEX: str(number)}
    judged = REFUSED if bound_s is None else SCHEDULED
    at = conditions.timestamp(b.NOW + timedelta(seconds=bound_s or 0))
    status = {**made["status"], "conditions": [{**judged, "lastTransitionTime": at}]}
    spec = made["spec"] if bound_s is not None else {}
    return {**made, "metadata": {**made["metadata"], "labels": labels}, "spec": spec, "status": status}


def several(*learners: b.Object, colocate: bool = False) -> tuple[b.Object, Observed]:
    """A job of a JobSet with two pods of the learner, whose servers answer."""
    learner = {"gpus": 1, "nodes": 2, **LIMIT}
    raw = jobset_job(config=b.job(config=b.COLOCATE if colocate else SHARDED)["spec"]["config"], learner=learner)
    if colocate:
        raw["spec"]["rollout"] = {}
    seen = observed_jobset(raw)
    return raw, replace(seen, pods=(*(() if colocate else seen.pods[:2]), *learners))


SECOND: dict[str, tuple[b.Object, str]] = {
    "without an image": (of_index(b.learner_pod(b.waiting("learner", NO_IMAGE, "no such image")), 1), "no such image"),
    "without a node": (of_index(b.pod(names.ROLE_LEARNER), 1, bound_s=None), "no GPU is free"),
}


@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("second", SECOND)
def test_stuck_second_learner_pod_is_reported_and_fails_at_start_deadline(second: str, colocate: bool) -> None:
    """The first one had begun, and waited for it without end."""
    pod, words = SECOND[second]
    raw, seen = several(of_index(b.learner_pod(), 0), pod, colocate=colocate)
    made = b.planned(raw, seen)
    assert b.condition(made, reasons.LEARNER_RUNNING) != ("True", reasons.LEARNER_STARTED)
    assert words in b.message(made, reasons.LEARNER_RUNNING)
    raw = b.with_status(raw, made)
    assert b.condition(b.planned(raw, seen, after_s=59), reasons.FAILED) is None
    late = b.planned(raw, seen, after_s=60)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert words in b.message(late, reasons.FAILED)
    assert late.deletions == (names.JOBSET,)


def test_start_deadline_does_not_run_while_jobset_has_no_node() -> None:
    raw, seen = several(*(of_index(b.pod(names.ROLE_LEARNER), number, bound_s=None) for number in (0, 1)))
    servers = [of_index(b.pod(names.ROLE_ROLLOUT), number, bound_s=None) for number in (0, 1)]
    seen = replace(seen, pods=(*servers, *seen.pods[2:]))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None
