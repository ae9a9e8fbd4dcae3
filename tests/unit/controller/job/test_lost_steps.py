"""Steps that a job has lost are said, and nothing promises a checkpoint that is not there."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_api.job_status import JobStatus
from stage2_controller.plan.result import Plan
from stage2_controller.report.explanation import events
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller.job.test_replaced_pods import another, leaving

EMPTY = [{"name": "data", "mountPath": "/data", "emptyDir": {}}]
EPHEMERAL = [
    {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "data"}},
    {"name": "runs", "mountPath": "/data/output", "emptyDir": {"medium": "Memory"}},
]
CLAIM = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
OF_TEMPLATE = {
    "gpus": 1,
    "template": {
        "spec": {
            "volumes": [{"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}],
            "containers": [
                {"name": "learner", "volumeMounts": [{"name": "scratch", "mountPath": "/data/output"}]},
            ],
        }
    },
}
KEPT_BY_TEMPLATE = {
    "gpus": 1,
    "template": {
        "spec": {
            "volumes": [CLAIM],
            "containers": [{"name": "learner", "volumeMounts": [{"name": "runs", "mountPath": "/data/output/"}]}],
        }
    },
}


def with_learner(**fields: Any) -> dict[str, Any]:
    return {"gpus": 1, "template": {"spec": {"containers": [{"name": "learner", **fields}]}}}


def writes_to(folder: str) -> dict[str, Any]:
    return {"training": {"output_dir": folder}}


OPEN = {"securityContext": {"readOnlyRootFilesystem": False}}
FLEETING: dict[str, dict[str, Any]] = {
    "an emptyDir": {"volumes": EMPTY},
    "an emptyDir within a claim": {"volumes": EPHEMERAL},
    "a volume of the learner's template": {"learner": OF_TEMPLATE},
    "the pod's own /tmp": {"config": {"training": {"output_dir": "/tmp/run"}}},
    "a relative folder, which begins in /tmp": {"config": writes_to("runs/a")},
    "a relative folder that leads into the root": {"config": writes_to("../srv/a"), "learner": with_learner(**OPEN)},
    "a relative folder of a working folder": {
        "config": writes_to("a"),
        "learner": with_learner(workingDir="/srv", **OPEN),
    },
    "no volume": {"config": writes_to("/srv/runs"), "learner": with_learner(**OPEN)},
    "shared memory": {"config": {"training": {"output_dir": "/dev/shm"}}},
}
LASTING: dict[str, dict[str, Any]] = {
    "a claim": {},
    "a claim of the learner's template": {"volumes": EMPTY, "learner": KEPT_BY_TEMPLATE},
    "a relative folder within a claim": {"config": writes_to("a"), "learner": with_learner(workingDir="/data/runs")},
    "a relative folder that leads to a claim": {"config": writes_to("../data/a")},
    "a folder of the node": {"volumes": [{"name": "data", "mountPath": "/data", "hostPath": {"path": "/runs"}}]},
}


def trained(raw: b.Object, *, step: int = 11, **report: Any) -> b.Object:
    return b.with_status(raw, b.planned(raw, b.started(raw, progress=b.report(step, **report))))


def seen_anew(raw: b.Object, *, step: int = 0, resumed: int | None) -> Observed:
    """What is observed once a new learner trains, which began at step `resumed`."""
    return b.started(
        raw,
        pods=(b.rollout_pod(True, True, True), another(b.learner_pod())),
        progress=b.report(step, resumed_step=resumed),
    )


def kept(made: Plan) -> tuple[str, str] | None:
    return b.condition(made, reasons.STEPS_KEPT)


@pytest.mark.parametrize("where", FLEETING)
def test_steps_lost_with_temporary_output_folder_set_condition_and_event(where: str) -> None:
    raw = trained(b.job(**FLEETING[where]))
    before = raw["status"]
    made = b.planned(raw, seen_anew(raw, resumed=0))
    assert kept(made) == ("False", reasons.STEPS_LOST)
    message = b.message(made, reasons.STEPS_KEPT)
    assert message.startswith("11 steps are lost: a learner had done step 11, and this one began at step 0")
    assert "ends with its pod" in message
    (event,) = [one for one in events(before, made.status) if one.reason == reasons.STEPS_LOST]
    assert (event.type, event.message) == ("Warning", message)
    assert made.status["furthestStep"] == 11
    JobStatus.model_validate(made.status)


def test_steps_after_last_checkpoint_are_reported_as_lost() -> None:
    raw = trained(b.job())
    made = b.planned(raw, seen_anew(raw, resumed=8))
    assert b.message(made, reasons.STEPS_KEPT) == (
        "3 steps are lost: a learner had done step 11, and this one began at step 8, the newest checkpoint"
    )


def test_lost_steps_are_reported_until_redone_with_single_event() -> None:
    raw = trained(b.job(volumes=EMPTY))
    told: list[str] = []
    for step in (0, 4, 10, 11, 12):
        made = b.planned(raw, seen_anew(raw, step=step, resumed=0))
        told += [event.reason for event in events(raw["status"], made.status)]
        raw = b.with_status(raw, made)
        assert (kept(made) is not None) is (step < 11)
    assert told.count(reasons.STEPS_LOST) == 1
    assert raw["status"]["furthestStep"] == 12


@pytest.mark.parametrize("resumed", [11, 12, None], ids=["all kept", "more than was seen", "an older learner"])
def test_no_steps_are_reported_lost_when_learner_resumes_where_it_was(resumed: int | None) -> None:
    raw = trained(b.job())
    assert kept(b.planned(raw, seen_anew(raw, resumed=resumed))) is None


def test_restart_inside_pod_can_lose_steps() -> None:
    raw = trained(b.job())
    made = b.planned(raw, b.started(raw, progress=b.report(0, resumed_step=5, restarts=1)))
    assert kept(made) == ("False", reasons.STEPS_LOST)


def test_edited_run_does_not_report_lost_steps() -> None:
    """It has another output folder, or another course, and begins anew as its author wants."""
    raw = trained(b.job())
    edited = b.edited({**raw, "status": {**raw["status"], "phase": "Suspended"}}, image="another:1")
    made = b.planned(edited, Observed(secret=b.secret()))
    assert "furthestStep" not in made.status


def suspended(raw: b.Object, observed: Observed) -> Plan:
    return b.planned(b.edited(raw, suspend=True), observed)


@pytest.mark.parametrize("where", FLEETING)
def test_suspended_job_with_temporary_output_promises_no_checkpoint(where: str) -> None:
    raw = trained(b.job(**FLEETING[where]))
    message = suspended(raw, Observed(secret=b.secret())).status["message"]
    assert message.startswith("spec.suspend is true: no pod exists; set it to false to start again at step 0")
    assert "checkpoint" not in message
    assert "ends with its pod" in message


@pytest.mark.parametrize("where", LASTING)
def test_suspended_job_with_persistent_output_promises_resume_from_checkpoint(where: str) -> None:
    raw = trained(b.job(**LASTING[where]))
    message = suspended(raw, Observed(secret=b.secret())).status["message"]
    assert message == (
        "spec.suspend is true: no pod exists; set it to false to resume from the last checkpoint (a learner had done"
        " step 11)"
    )


def test_suspended_job_without_any_step_promises_no_checkpoint() -> None:
    message = b.planned(b.job(suspend=True)).status["message"]
    assert message == "spec.suspend is true: no pod exists; set it to false to start"


WAITS = b.waiting_learner_pod()


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (b.learner_pod(), "the pods end, and the learner first writes its checkpoint"),
        (WAITS, "the pods end"),
        (leaving(WAITS), "the pods end"),
        (leaving(b.learner_pod()), "the pods end, and the learner first writes its checkpoint"),
        (leaving(b.learner_pod(b.down("learner", 75))), "the pods end"),
    ],
    ids=["it runs", "it waits", "it waited", "it is told to stop", "it has stopped"],
)
def test_message_promises_checkpoint_of_ending_learner_only_while_it_runs(learner: b.Object, words: str) -> None:
    raw = b.job()
    ending = replace(b.started(raw), learner=None, deployment=None, pods=(learner,), progress=None)
    made = suspended(raw, ending)
    assert made.status["message"] == f"spec.suspend is true: {words}"
    moving = b.planned(raw, ending)
    running = b.message(moving, reasons.LEARNER_RUNNING)
    assert ("checkpoint" in running) is ("checkpoint" in words), running


def test_suspension_message_mentions_no_checkpoint_when_output_is_temporary() -> None:
    raw = b.job(volumes=EMPTY)
    ending = replace(b.started(raw), learner=None, deployment=None, pods=(leaving(b.learner_pod()),), progress=None)
    assert suspended(raw, ending).status["message"] == "spec.suspend is true: the pods end"
