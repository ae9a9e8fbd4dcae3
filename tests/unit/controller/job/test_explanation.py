"""What conditions mean to a person: the explanation why a job does not train, and events."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage2_api.pod.report import PhaseShares
from stage2_controller.job import names
from stage2_controller.report import explanation
from stage2_controller.report.explanation import events
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import planned


def test_unchanged_status_emits_no_event() -> None:
    raw = b.job()
    status = b.planned(raw, b.started(raw)).status
    assert events(status, status) == []


def test_progress_emits_no_event() -> None:
    raw = b.job()
    first = b.planned(raw, b.started(raw)).status
    later = b.planned(raw, b.started(raw, progress=b.report(step=5))).status
    assert first != later
    assert events(first, later) == []


def test_waiting_new_job_emits_no_event() -> None:
    assert events({}, b.planned(b.job()).status) == []


def test_invalid_spec_emits_single_warning() -> None:
    (event,) = events({}, b.planned(b.job(learner={"gpus": 2})).status)
    assert (event.type, event.reason) == ("Warning", "InvalidSpec")


SOURCES = "\n".join(path.read_text(encoding="utf-8") for path in Path(str(reasons.__file__)).parents[1].rglob("*.py"))
FAILURES = set(re.findall(r"""(?:Outcome|Condition)\(reasons\.FAILED, (?:"True", )?reasons\.(\w+)""", SOURCES))


def test_failure_reasons_include_known_failures() -> None:
    assert {"INVALID_SPEC", "CONFIGURATION_ERROR", "START_DEADLINE", "DEADLINE_EXCEEDED"} <= FAILURES


@pytest.mark.parametrize("reason", sorted(FAILURES))
def test_every_failure_reason_is_emitted_as_warning(reason: str) -> None:
    reported = {"type": reasons.FAILED, "status": "True", "reason": getattr(reasons, reason), "message": "why"}
    (event,) = events({}, {"conditions": [reported]})
    assert event.type == "Warning"


def test_milestones_of_run_are_emitted_as_events() -> None:
    raw = b.job()
    observed = b.started(raw)
    stages = [
        b.pods_alone(b.rollout_pod(True, True, True)),
        observed,
        replace(observed, learner=b.learner_job(b.planned(raw, observed), b.job_condition("Complete"))),
    ]
    reported: list[str] = []
    previous: dict[str, object] = {}
    for stage in stages:
        status = b.planned({**raw, "status": previous}, stage).status
        reported += [event.reason for event in events(previous, status)]
        previous = status
    assert reported == ["ServersReady", "LearnerStarted", "SameVersion", "LearnerSucceeded"]


CRASH = b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "CrashLoopBackOff", last=b.ended(1, "CUDA out of memory")))
NO_IMAGE = b.pod(names.ROLE_ROLLOUT, b.waiting("server-1", "ImagePullBackOff", "no such image"))

NO_QUOTA = Observed(
    deployment={
        **b.child(b.planned(b.job()), "Deployment"),
        "status": b.refused_by_quota("exceeded quota: team, limited: pods=0"),
    },
    secret=b.secret(),
)

# what is wrong, GPUs of the node, what is observed, the link, its reason, words of the fix
CASES: list[tuple[str, int, Observed, str, str, str]] = [
    ("no room", 3, b.NOTHING, "placement", reasons.NO_NODE_FITS, "spec.placement, spec.rollout and spec.learner"),
    ("above a quota", 4, Observed(over_quota="needs 4"), "placement", reasons.QUOTA_EXCEEDED, "the ResourceQuota that"),
    ("quota", 4, NO_QUOTA, "servers", reasons.POD_REFUSED, "ResourceQuota"),
    ("no pod yet", 4, b.NOTHING, "servers", reasons.NOT_CREATED, "kubectl describe job/job-3v1-learner "),
    ("image", 4, b.pods_alone(NO_IMAGE), "servers", reasons.IMAGE_UNAVAILABLE, "spec.image"),
    ("crash", 4, b.pods_alone(CRASH), "servers", reasons.SERVER_CRASHED, "rollout_matching.vllm"),
    ("loading", 4, b.pods_alone(b.rollout_pod(True, True, False)), "servers", reasons.SERVERS_LOADING, "logs"),
]


def first(job: Any) -> explanation.Step:
    return next(step for step in explanation.chain(job) if step.state != "ok")


@pytest.mark.parametrize(("gpus", "seen", "link", "reason", "fix"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_explain_names_first_missing_thing_and_its_fix(
    gpus: int, seen: Observed, link: str, reason: str, fix: str
) -> None:
    raw = b.job()
    made = planned(raw, n.capacity(n.node(gpus=gpus)), seen)
    found = first(b.with_status(raw, made))
    assert (found.name, found.reason) == (link, reason)
    assert fix in found.fix


def test_training_condition_and_explain_agree() -> None:
    raw = b.job()
    made = planned(raw, n.capacity(n.node(gpus=3)))
    found = first(b.with_status(raw, made))
    assert b.condition(made, reasons.TRAINING) == ("False", found.reason)
    assert b.message(made, reasons.TRAINING) == f"{found.name}: {found.message}; see: {found.fix}"


def test_training_job_has_no_problem_and_reports_last_step() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw))
    assert b.condition(made, reasons.TRAINING) == ("True", reasons.TRAINS)
    steps = explanation.chain(b.with_status(raw, made))
    assert {step.state for step in steps} == {"ok"}
    assert steps[-1].message == "step 4 of 10, loss 0.5, 1,200 tokens/s; weights of step 4 pushed in 0.2 s"


@pytest.mark.parametrize(
    ("sync", "waits"), [(None, "the learner has not pushed its weights yet"), ("kept", "no optimizer step is done yet")]
)
def test_loading_learner_reports_current_activity(sync: str | None, waits: str) -> None:
    raw = b.job()
    doing = "first evaluation, before training; generating: 37 of 200 answers (40 s)"
    report = b.report(0, pushed=0, held=(0, 0, 0), phase="rollout", message=doing)
    made = b.planned(raw, b.started(raw, progress=report if sync else report.model_copy(update={"sync": None})))
    assert made.status["message"] == f"{waits}; the learner runs: {doing}"
    assert doing in b.message(made, reasons.TRAINING)
    assert explanation.first(explanation.chain(b.with_status(raw, made))).message == made.status["message"]


def test_last_push_is_reported_with_transport_and_place_of_adapter_merge() -> None:
    raw = b.job()
    sync = b.report().sync
    assert sync is not None
    found = {
        "transport": "nccl",
        "gigabytes_per_second": 1.25,
        "merge": "learner",
        "merge_reason": "its folder differs",
        "phases": PhaseShares(send=0.5),
    }
    made = b.planned(raw, b.started(raw, progress=b.report(sync=sync.model_copy(update=found))))
    assert explanation.chain(b.with_status(raw, made))[-1].message.endswith(
        "pushed in 0.2 s over nccl at 1.2 GB/s, adapters merged at the learner (its folder differs)"
    )
    assert made.status["sync"]["mergeReason"] == "its folder differs"
    assert made.status["sync"]["phases"]["send"] == 0.5


def test_servers_with_outdated_weights_are_reported() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw, progress=b.report(held=(4, 3, 4))))
    assert first(b.with_status(raw, made)).name == "weights"


def test_suspended_job_is_explained_by_suspend_field() -> None:
    raw = b.job(suspend=True)
    assert first(b.with_status(raw, b.planned(raw))).fix == "spec.suspend of rmj/job-3v1"


def test_failed_job_reports_only_its_outcome() -> None:
    raw = b.job()
    failed = b.learner_job(b.planned(raw, b.started(raw)), b.job_condition("Failed", "BackoffLimitExceeded"), failed=4)
    pods = (b.learner_pod(b.down("learner", 1, "out of memory")),)
    made = b.planned(raw, b.started(raw, learner=failed, pods=pods))
    steps = explanation.chain(b.with_status(raw, made))
    assert [step.name for step in steps] == ["spec", "outcome"]
    assert "spec.learner.backoffLimit" in steps[-1].fix


@pytest.mark.parametrize("name", ["job-3v1", "qwen2.5-vl", "3b-run", "a" * 60])
@pytest.mark.parametrize("kind", ["Deployment", "Job", "Workload"])
def test_suggested_commands_name_existing_children(name: str, kind: str) -> None:
    raw = b.job(name)
    raw["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    made = {
        item["kind"]: item for item in b.planned(b.job(name), b.pods_alone(b.rollout_pod(True, True, True))).children
    }
    made["Workload"] = b.child(b.planned(raw), "Workload")
    reason = {"Deployment": reasons.SERVER_CRASHED, "Job": reasons.LEARNER_RETRYING, "Workload": reasons.QUOTA_PENDING}[
        kind
    ]
    words = explanation._fix(reason, raw).replace("/", " ").replace(";", " ").split()
    assert made[kind]["metadata"]["name"] in words


def test_suggested_commands_do_not_build_child_names_themselves() -> None:
    texts = [*explanation._PATIENCE.values(), *explanation._FIXES.values()]
    assert [text for text in texts if "{job}-" in text or "workload {job}" in text] == []


def test_finished_learner_is_not_reported_as_problem() -> None:
    raw = b.job()
    done = b.learner_pod(b.down("learner", 0, b.termination(phase="done")))
    made = b.planned(raw, b.started(raw, pods=(b.rollout_pod(True, True, True), done)))
    assert {step.state for step in explanation.chain(b.with_status(raw, made))} == {"ok"}
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.LEARNER_FINISHED)


TYPES_AND_PHASES = {kind for _, kind in explanation.CHAIN} | {
    *explanation.SUMMARY,
    reasons.STEPS_KEPT,
    reasons.PODS_ENDED,
    reasons.PENDING,
    reasons.STARTING,
    reasons.RUNNING,
    reasons.SUCCEEDED,
    reasons.FAILED,
}
OF_WHAT_HOLDS = {
    reasons.VALID,
    reasons.KEYS_IGNORED,
    reasons.NODE_CHOSEN,
    reasons.APPLIED,
    reasons.SERVERS_READY,
    reasons.LEARNER_STARTED,
    reasons.SAME_VERSION,
    reasons.ADMITTED,
    reasons.TRAINS,
    reasons.LEARNER_SUCCEEDED,
}
# of a job that has ended; of the last link, no condition
NEVER_LOOKED_UP = {reasons.RELEASED, reasons.LEARNER_FINISHED, reasons.NO_STEP_YET}
WORDS = {word for name, word in vars(reasons).items() if name.isupper()}
STOPS = WORDS - TYPES_AND_PHASES - OF_WHAT_HOLDS - NEVER_LOOKED_UP
NOTHING_TO_LOOK_AT = {reasons.WAITING_FOR_SERVERS, reasons.NODE_LOST, reasons.NODE_FULL, reasons.NODE_DRAINED}
"""What the controller itself makes right; another link, or the condition's own message, says why it takes a while."""


@pytest.mark.parametrize("reason", sorted(STOPS | explanation._WARNINGS))
def test_every_blocking_reason_has_either_fix_or_advice_to_wait(reason: str) -> None:
    assert (reason in explanation._PATIENCE) is not (reason in explanation._FIXES), "one of them knows it"
    assert bool(explanation._fix(reason, b.job())) is (reason not in NOTHING_TO_LOOK_AT)


def test_explain_knows_only_blocking_reasons() -> None:
    assert {*explanation._PATIENCE, *explanation._FIXES} == STOPS


def wrong_image(template: Any, pulled: str, container: str, **spec: Any) -> explanation.Step:
    """What is told of a job whose container has an image that cannot be pulled."""
    raw = b.job(learner={"gpus": 1, "template": {"spec": template}}, **spec)
    status = {**b.waiting(container, "ImagePullBackOff", "not found"), "image": pulled}
    pods = (b.rollout_pod(True, True, True), b.pod(names.ROLE_LEARNER, status))
    return first(b.with_status(raw, b.planned(raw, b.started(raw, pods=pods, progress=None))))


OF_TEMPLATE = "spec.learner.template.spec"
OWN_IMAGE = {"containers": [{"name": "learner", "image": "registry.example/wrong:1"}]}
DOWNLOADS = {"initContainers": [{"name": "download", "image": "registry.example/aws:2"}]}


@pytest.mark.parametrize(
    ("template", "image", "container", "spec", "fix"),
    [
        (OWN_IMAGE, "registry.example/wrong:1", "learner", {}, f"{OF_TEMPLATE}.containers[learner].image"),
        (DOWNLOADS, "registry.example/aws:2", "download", {}, f"{OF_TEMPLATE}.initContainers[download].image"),
        (DOWNLOADS, "my/trainer:1", "learner", {}, "spec.image"),
        ({}, "stage2/trainer:test", "learner", {"image": None}, "spec.image, or image.trainer of the chart"),
    ],
)  # fmt: skip
def test_missing_image_is_explained_by_field_that_sets_it(
    template: Any, image: str, container: str, spec: Any, fix: str
) -> None:
    """An image of the learner's template was explained by spec.image."""
    step = wrong_image(template, image, container, **spec)
    assert step.reason == reasons.IMAGE_UNAVAILABLE
    assert step.fix == f"{fix}, or spec.imagePullSecrets of rmj/job-3v1"


COLOCATED = b.job(config=b.COLOCATE, rollout={}, learner={"gpus": 4})


@pytest.mark.parametrize("reason", sorted(STOPS | explanation._WARNINGS))
def test_colocated_job_gets_no_command_about_deployment(reason: str) -> None:
    fix = explanation._fix(reason, COLOCATED)
    assert "deployment/" not in fix or reason in OF_SERVERS


OF_SERVERS = {reasons.SERVERS_LOADING, reasons.SERVER_CRASHED, reasons.SERVER_RESTARTED}
"""What only a job with servers can have."""


def test_colocated_learner_without_pod_is_explained_by_its_job() -> None:
    made = b.planned(COLOCATED)
    found = first(b.with_status(COLOCATED, made))
    assert (found.name, found.reason) == ("learner", reasons.NOT_CREATED)
    assert found.fix == "kubectl describe job/job-3v1-learner"
