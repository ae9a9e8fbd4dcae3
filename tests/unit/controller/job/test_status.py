"""What a person and a program read in the status, stage by stage."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_api.pod.report import read_report
from stage2_controller.job import names
from stage2_controller.state import reasons
from stage2_controller.state.diagnose import last_message
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b

TRACEBACK = """  File "engine.py", line 1431, in wait
    raise RuntimeError(
RuntimeError: the engine did not start
"""


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exitCode": 1, "message": TRACEBACK}, "exit code 1: RuntimeError: the engine did not start"),
        (
            {"exitCode": 64, "message": "a: 1; too small\nb: 2; too large"},
            "exit code 64: a: 1; too small b: 2; too large",
        ),
        ({"exitCode": 75, "message": b.termination(message="lost server-1")}, "exit code 75: lost server-1"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "exit code 137: OOMKilled"),
        ({"exitCode": 2}, "exit code 2: no message"),
    ],
    ids=["a traceback", "broken rules", "a report", "only a reason", "nothing"],
)
def test_last_message_of_ended_container_is_extracted(ended: dict[str, object], words: str) -> None:
    assert last_message(ended) == words


SCHEDULER = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
UNPLACED = b.pod(
    names.ROLE_ROLLOUT,
    node=None,
    conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": SCHEDULER}],
)


def crashed(server: str, exit_code: int, text: str) -> Any:
    """The rollout pod with a server that waits to be started again."""
    return b.pod(names.ROLE_ROLLOUT, b.waiting(server, "CrashLoopBackOff", last=b.ended(exit_code, text)))


# name, the rollout pod, the reason of RolloutReady, words of its message
ROLLOUT: list[tuple[str, Any, str, list[str]]] = [
    ("there is no pod", None, reasons.NOT_CREATED, []),
    ("no node has room", UNPLACED, reasons.UNSCHEDULABLE, [SCHEDULER]),
    ("containers are being made", b.pod(names.ROLE_ROLLOUT), reasons.CONTAINERS_STARTING, []),
    (
        "an image is missing",
        b.pod(names.ROLE_ROLLOUT, b.up("server-0"), b.waiting("server-1", "ImagePullBackOff", "no such image")),
        reasons.IMAGE_UNAVAILABLE,
        ["my/trainer:1", "server-1", "no such image"],
    ),
    (
        "a Secret is missing",
        b.pod(names.ROLE_ROLLOUT, b.waiting("server-0", "CreateContainerConfigError", 'secret "x" not found')),
        reasons.CONTAINER_CONFIG,
        ["server-0", 'secret "x" not found'],
    ),
    (
        "a server crashes",
        crashed("server-0", 1, "CUDA out of memory"),
        reasons.SERVER_CRASHED,
        ["server-0", "exit code 1", "CUDA out of memory"],
    ),
    ("a server loads", b.rollout_pod(True, True, False), reasons.SERVERS_LOADING, ["2 of 3", "server-2"]),
    ("all servers answer", b.rollout_pod(True, True, True), reasons.SERVERS_READY, ["3 servers"]),
]


@pytest.mark.parametrize(("pod", "reason", "words"), [case[1:] for case in ROLLOUT], ids=[case[0] for case in ROLLOUT])
def test_rollout_ready_condition_names_missing_servers(pod: Any, reason: str, words: list[str]) -> None:
    made = b.planned(b.job(), Observed(pods=(pod,) if pod else ()))
    truth = "True" if reason == reasons.SERVERS_READY else "False"
    assert b.condition(made, reasons.ROLLOUT_READY) == (truth, reason)
    assert all(word in b.message(made, reasons.ROLLOUT_READY) for word in words)


def test_status_and_conditions_carry_observed_generation() -> None:
    raw = b.job()
    made = b.planned({**raw, "metadata": {**raw["metadata"], "generation": 7}}, Observed())
    assert made.status["observedGeneration"] == 7
    assert {condition["observedGeneration"] for condition in made.status["conditions"]} == {7}


def learner_failed(exit_code: int, reason: str, text: str) -> dict[str, Any]:
    raw = b.job()
    job = b.learner_job(b.planned(raw, b.started(raw)), b.job_condition("Failed", reason, "Job failed"), failed=4)
    return {"learner": job, "pods": (b.learner_pod(b.down("learner", exit_code, text)),), "progress": None}


def beside_servers(learner: dict[str, Any]) -> dict[str, Any]:
    return {"pods": (b.rollout_pod(True, True, True), b.learner_pod(learner))}


# name, what differs from a running job, phase, condition, reason, words of its message
Differs = Callable[[], dict[str, Any]]  # called in the test: what a test plans, it plans itself

OUTCOMES: list[tuple[str, Differs, str, str, str, list[str]]] = [
    ("it trains", dict, reasons.RUNNING, reasons.LEARNER_RUNNING, reasons.LEARNER_STARTED, []),
    (
        "the learner loads its image",
        lambda: beside_servers(b.waiting("learner", "ContainerCreating")),
        reasons.STARTING,
        reasons.LEARNER_RUNNING,
        reasons.CONTAINERS_STARTING,
        [],
    ),
    (
        "the learner is done and its Job has not noticed",
        lambda: beside_servers(b.down("learner", 0, b.termination(phase="done"))),
        reasons.SUCCEEDED,
        reasons.LEARNER_RUNNING,
        reasons.LEARNER_FINISHED,
        [],
    ),
    (
        "the learner waits for its next try",
        lambda: beside_servers(b.down("learner", 75, "lost server-1")),
        reasons.STARTING,
        reasons.LEARNER_RUNNING,
        reasons.LEARNER_RETRYING,
        ["exit code 75", "lost server-1"],
    ),
    (
        "the learner used up its tries",
        lambda: learner_failed(1, "BackoffLimitExceeded", b.termination(message="CUDA out of memory")),
        reasons.FAILED,
        reasons.FAILED,
        reasons.BACKOFF_LIMIT,
        ["CUDA out of memory", "spec.learner.backoffLimit"],
    ),
    (
        "the learner used up its tries in its pod",
        lambda: learner_failed(69, "PodFailurePolicy", b.termination(message="CUDA out of memory")),
        reasons.FAILED,
        reasons.FAILED,
        reasons.BACKOFF_LIMIT,
        ["CUDA out of memory", "spec.learner.backoffLimit"],
    ),
    (
        "the learner refused its configuration",
        lambda: learner_failed(64, "PodFailurePolicy", "custom.train_jsonl: /data/x; must exist"),
        reasons.FAILED,
        reasons.FAILED,
        reasons.CONFIGURATION_ERROR,
        ["custom.train_jsonl"],
    ),
    (
        "a server refused its configuration",
        lambda: {"learner": None, "progress": None, "pods": (crashed("server-0", 64, "no token"),)},
        reasons.FAILED,
        reasons.FAILED,
        reasons.CONFIGURATION_ERROR,
        ["server-0", "no token"],
    ),
]


@pytest.mark.parametrize(
    ("more", "phase", "condition", "reason", "words"),
    [case[1:] for case in OUTCOMES],
    ids=[case[0] for case in OUTCOMES],
)
def test_phase_and_reason_follow_from_pods_and_learner(
    more: Differs, phase: str, condition: str, reason: str, words: list[str]
) -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw, **more()))
    assert made.status["phase"] == phase
    found = b.condition(made, condition)
    assert found is not None
    assert found[1] == reason
    assert all(word in b.message(made, condition) for word in words)


def test_progress_in_status_comes_from_learner_report() -> None:
    raw = b.job()
    status = b.planned(raw, b.started(raw)).status
    assert (status["step"], status["maxSteps"], status["progress"], status["loss"]) == (4, 10, "4/10", 0.5)
    assert status["tokensPerSecond"] == 1200.5
    assert status["reproducibility"] == {"rollout_seed": 17}
    assert (status["node"], status["rollout"]) == (b.NODE, "3/3")


def test_progress_is_kept_while_learner_is_unreachable() -> None:
    raw = b.job()
    running = b.with_status(raw, b.planned(raw, b.started(raw)))
    assert b.planned(running, b.started(raw, progress=None)).status == running["status"]


def test_first_step_time_is_recorded_per_start() -> None:
    raw = b.job()
    waits = b.planned(raw, b.started(raw, progress=b.report(step=0)))
    assert "firstStepTime" not in waits.status
    steps = b.planned(b.with_status(raw, waits), b.started(raw), after_s=60)
    assert steps.status["firstStepTime"] == "2026-01-02T03:05:05Z"
    silent = b.planned(b.with_status(raw, steps), b.started(raw, progress=None), after_s=90)
    assert silent.status["firstStepTime"] == steps.status["firstStepTime"]
    suspended = b.planned({**b.job(suspend=True), "status": steps.status}, b.started(raw), after_s=100)
    assert "firstStepTime" not in suspended.status
    ending = b.started(raw, learner=None, pods=(b.learner_pod(),))
    resumed = b.planned({**raw, "status": suspended.status}, ending, after_s=110)
    assert "firstStepTime" not in resumed.status, "the old learner's steps are none of this start"


def test_first_step_time_stays_absent_when_step_predates_upgrade() -> None:
    raw = b.job()
    status = b.planned(raw, b.started(raw)).status
    older = {key: value for key, value in status.items() if key != "firstStepTime"}
    assert "firstStepTime" not in b.planned({**raw, "status": older}, b.started(raw), after_s=60).status


def test_termination_message_of_learner_is_its_final_progress() -> None:
    raw = b.job()
    text = b.termination(step=10, phase="done")
    job = b.learner_job(b.planned(raw, b.started(raw)), b.job_condition("Complete"))
    made = b.planned(raw, b.started(raw, learner=job, progress=None, pods=(b.learner_pod(b.down("learner", 0, text)),)))
    assert (made.status["phase"], made.status["progress"]) == (reasons.SUCCEEDED, "10/10")
    assert b.condition(made, reasons.SUCCEEDED) == ("True", reasons.LEARNER_SUCCEEDED)
    assert made.status["completionTime"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(("code", "expected"), [(64, reasons.CONFIGURATION_ERROR), (69, reasons.BACKOFF_LIMIT)])
def test_failed_job_reads_exit_code_from_job_condition_once_pod_is_gone(code: int, expected: str) -> None:
    raw = b.job()
    policy = b.job_condition("Failed", "PodFailurePolicy", f"Container learner failed with exit code {code} matching")
    job = b.learner_job(b.planned(raw, b.started(raw)), policy)
    early = b.planned(raw, b.started(raw, learner=job, progress=None))
    assert b.condition(early, reasons.FAILED) is None
    late = b.planned(raw, b.started(raw, learner=job, progress=None, pods=()))
    assert b.condition(late, reasons.FAILED) == ("True", expected)


def test_restarts_inside_pod_and_failed_pods_are_added_up() -> None:
    raw = b.job()
    job = b.learner_job(b.planned(raw, b.started(raw)), failed=1)
    status = b.planned(raw, b.started(raw, learner=job, progress=b.report(restarts=2))).status
    assert status["restarts"] == 3
    without_a_pod = b.started(raw, learner=job, progress=None)
    assert b.planned({**raw, "status": status}, without_a_pod).status["restarts"] == 3, "no count falls"


def test_nan_loss_is_left_out_of_status() -> None:
    raw = b.job()
    made = b.planned(raw, b.started(raw, progress=b.report(loss=float("nan"))))
    assert "loss" not in made.status


def test_null_report_fields_are_left_out_of_status() -> None:
    raw = b.job()
    reported = read_report(b.report().document())
    assert reported is not None
    assert reported.reported()["sync"]["merge"] is None
    made = b.planned(raw, b.started(raw, progress=reported))
    assert made.status["sync"]["version"] == 4
    assert "merge" not in made.status["sync"]


def test_servers_are_listed_with_their_weights_version() -> None:
    raw = b.job()
    pods = (b.pod(names.ROLE_ROLLOUT, b.up("server-0"), b.up("server-1", ready=False, restarts=2), b.up("server-2")),)
    status = b.planned(raw, b.started(raw, pods=(*pods, b.learner_pod()), progress=b.report(held=(4, 0, 4)))).status
    assert status["servers"][1] == {
        "name": "server-1",
        "baseUrl": "https://job-3v1-rollout.team-a.svc:8001",
        "ready": False,
        "restarts": 2,
        "pod": "pod-rollout",
        "version": 0,
    }


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        (None, ("False", reasons.NOT_SYNCED_YET)),
        (b.report(), ("True", reasons.SAME_VERSION)),
        (b.report(held=(4, 0, 4)), ("False", reasons.VERSIONS_DIFFER)),
    ],
    ids=["before the first push", "all hold it", "a server came back empty"],
)
def test_weights_in_sync_compares_versions_held_by_servers(progress: Any, expected: tuple[str, str]) -> None:
    raw = b.job()
    assert b.condition(b.planned(raw, b.started(raw, progress=progress)), reasons.WEIGHTS_IN_SYNC) == expected


def test_invalid_spec_is_refused_with_advice() -> None:
    raw = b.job(learner={"gpus": 2})
    made = b.planned(raw)
    assert (made.children, made.again_after_s) == ((), None)
    assert made.status["phase"] == reasons.FAILED
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert "spec.learner.gpus: 2; " in b.message(made, reasons.ACCEPTED)


def test_corrected_refused_spec_runs() -> None:
    refused = b.job(learner={"gpus": 2})
    corrected = {**b.job(), "status": b.planned(refused).status}
    made = b.planned(corrected)
    assert made.status["phase"] == reasons.PENDING
    assert b.condition(made, reasons.FAILED) is None
    assert "Deployment" in b.kinds(made)


def test_invalid_edit_is_reported_and_job_keeps_running() -> None:
    raw = b.job()
    observed = b.started(raw)
    running = b.planned(raw, observed)
    broken = b.edited({**raw, "status": running.status}, learner={"gpus": 2})
    made = b.planned(broken, observed)
    assert made.status["phase"] == reasons.RUNNING
    assert (made.children, made.deletions) == ((), ())
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)


@pytest.mark.parametrize(
    ("end", "phase", "reason"),
    [
        (b.job_condition("Complete"), reasons.SUCCEEDED, reasons.LEARNER_SUCCEEDED),
        (b.job_condition("Failed", reasons.BACKOFF_LIMIT), reasons.FAILED, reasons.BACKOFF_LIMIT),
    ],
)
def test_running_job_refused_by_newer_rule_still_ends_with_its_learner(end: Any, phase: str, reason: str) -> None:
    """The rule may have come with an upgrade: its servers kept their GPUs for good."""
    raw = b.job()
    observed = b.started(raw)
    broken = {**b.job(learner={"gpus": 2}), "status": b.planned(raw, observed).status}
    pods = (observed.pods[0], b.learner_pod(b.down("learner", int(phase == reasons.FAILED))))
    done = replace(observed, learner=b.learner_job(b.planned(raw, observed), end), pods=pods)
    made = b.planned(broken, done)
    assert (made.status["phase"], made.deletions) == (phase, ("Deployment",))
    assert b.condition(made, phase) == ("True", reason)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.NO_LONGER_VALID)
    assert made.status["completionTime"] == "2026-01-02T03:04:05Z"
    again = b.planned({**broken, "status": made.status}, replace(done, deployment=None))
    assert (again.status, again.deletions) == (made.status, ())


def test_job_managed_by_other_controller_is_ignored() -> None:
    made = b.planned(b.job(managedBy="kueue.x-k8s.io/multikueue"))
    assert (made.children, made.status) == ((), {})


def test_transition_time_changes_only_with_condition_status() -> None:
    raw = b.job()
    first = b.with_status(raw, b.planned(raw, Observed(pods=(b.rollout_pod(True, True, False),))))
    loading = b.planned(first, Observed(pods=(b.rollout_pod(True, False, False),)), after_s=60)
    ready = b.planned(first, Observed(pods=(b.rollout_pod(True, True, True),)), after_s=60)

    def since(made: Any) -> str:
        (found,) = [item for item in made.status["conditions"] if item["type"] == reasons.ROLLOUT_READY]
        return str(found["lastTransitionTime"])

    assert since(loading) == "2026-01-02T03:04:05Z"
    assert since(ready) == "2026-01-02T03:05:05Z"


def test_status_fits_crd_schema() -> None:
    raw = b.job()
    stages = (b.NOTHING, b.started(raw), b.completed(raw))
    for made in (*(b.planned(raw, seen) for seen in stages), b.planned(b.job(learner={"gpus": 2}))):
        parsed = JobStatus.model_validate(made.status)
        written = parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert written == made.status, "a field that the schema lacks would be pruned and written again for ever"
