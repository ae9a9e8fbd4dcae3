"""The time to start bounds every way of not starting: GPUs are not held for ever by a job that cannot train."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stage2_controller import conditions, reasons
from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller.job.test_replaced_pods import another

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
def test_a_job_that_does_not_start_in_time_fails_and_says_what_it_lacks(way: str) -> None:
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
def test_a_colocated_learner_without_an_image_fails_in_time(learner: b.Object) -> None:
    """It held its GPUs without end."""
    raw, seen = colocated(learner)
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=59), reasons.FAILED) is None
    made = b.planned(raw, seen, after_s=60)
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)
    assert made.deletions == ("Job",)


def test_the_admin_bounds_the_start_of_a_colocated_job_too() -> None:
    raw, seen = colocated(b.learner_pod(b.waiting("learner", NO_IMAGE)), limit_s=7200)
    settings = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, longest_start_seconds=60))
    raw = b.with_status(raw, b.plan(raw, seen, settings=settings))
    made = b.plan(raw, seen, settings=settings, now=b.NOW + timedelta(seconds=60))
    assert b.condition(made, reasons.FAILED) == ("True", reasons.START_DEADLINE)


def test_a_colocated_job_without_a_node_has_all_its_time() -> None:
    raw, seen = colocated(b.pod(names.ROLE_LEARNER, node=None))
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None
    raw, seen = colocated()
    seen = replace(seen, learner_refused="exceeded quota")
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None


def test_servers_that_answer_for_a_moment_start_no_new_time() -> None:
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
def test_a_learner_that_has_begun_has_started(learner: b.Object) -> None:
    raw, seen = b.job(learner={"gpus": 1, **LIMIT}), beside_servers(learner)
    raw = b.with_status(raw, b.planned(raw, seen))
    assert b.condition(b.planned(raw, seen, after_s=DAY_S), reasons.FAILED) is None


def test_a_learner_in_a_new_pod_has_all_of_the_time_again() -> None:
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


def test_a_pod_that_got_its_node_later_counts_from_then() -> None:
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
