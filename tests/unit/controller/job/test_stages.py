"""In every stage of a job, its message, kubectl's columns, its conditions and `stage2 job explain` say the same."""

from pathlib import Path
from typing import Any, get_args

import pytest
from lupa.lua51 import LuaRuntime  # Argo CD runs Lua 5.1

from stage2_api.crd import custom_resource_definition
from stage2_api.job_status import JobStatus, Phase
from stage2_cli.explain import show
from stage2_controller.job import names
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_controller.state.store import slim
from tests.unit.controller import builders as b
from tests.unit.controller import stages
from tests.unit.controller.stages import STAGES

ROOT = Path(__file__).parents[4]
EVERY = pytest.mark.parametrize("name", STAGES)


def columns(job: Any) -> dict[str, str]:
    """What kubectl prints of the phase, and of the reason of a condition."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    paths = {column["name"]: column["jsonPath"] for column in version["additionalPrinterColumns"]}
    assert paths["Phase"] == ".status.phase"
    kind = paths["Reason"].removeprefix('.status.conditions[?(@.type=="').removesuffix('")].reason')
    found = conditions.find(job["status"], kind)
    return {"Phase": job["status"]["phase"], "Reason": found["reason"] if found else ""}


@EVERY
def test_message_printed_columns_and_explain_agree_in_every_stage(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = STAGES[name]
    job = stage.reach()
    told = explanation.first(explanation.chain(job))
    assert columns(job) == {"Phase": stage.phase, "Reason": stage.reason}
    assert (told.reason, told.message) == (stage.reason, job["status"]["message"])
    assert show(job, as_json=False) == (told.state != "ok")
    printed = capsys.readouterr().out
    assert told.message in " ".join(printed.split())
    assert (f"{told.name} ({told.reason}): {told.message}" in printed) is (told.state != "ok")
    assert ("Not training" in printed) is (told.state != "ok" and not trains(job))


def trains(job: Any) -> bool:
    return (conditions.find(job["status"], reasons.TRAINING) or {})["status"] == "True"


@EVERY
def test_kstatus_conditions_follow_from_same_reason(name: str) -> None:
    stage = STAGES[name]
    job = stage.reach()
    found = {item["type"]: item for item in job["status"]["conditions"] if item["type"] in explanation.SUMMARY}
    wanted = {
        stages.CURRENT: ("True", set()),
        stages.IN_PROGRESS: ("False", {reasons.RECONCILING}),
        stages.FAILED: ("False", {reasons.STALLED}),
    }
    assert (found["Ready"]["status"], found.keys() - {"Ready", "Training"}) == wanted[stage.kstatus]
    assert {item["reason"] for item in found.values()} == {stage.reason}
    generations = {item["observedGeneration"] for item in found.values()} | {job["status"]["observedGeneration"]}
    assert generations == {job["metadata"]["generation"]}
    JobStatus.model_validate(job["status"])


def test_stages_cover_every_phase_and_every_link_of_explain() -> None:
    reached = [stage.reach() for stage in STAGES.values()]
    assert {job["status"]["phase"] for job in reached} == set(get_args(Phase))
    told = {explanation.first(explanation.chain(job)).name for job in reached}
    assert told == {name for name, _ in explanation.CHAIN} | {"outcome", "steps"}


def test_suspended_job_message_does_not_claim_learner_runs() -> None:
    """The message was that of the learner, which had just been ended."""
    job = STAGES["suspended"].reach()
    assert job["status"]["message"].startswith("spec.suspend is true: no pod exists")


def test_message_about_failed_servers_clears_once_they_answer() -> None:
    """It stayed while no report of the learner came."""
    raw = STAGES["a server fails in mid-run"].reach()
    assert raw["status"]["message"].startswith("2 of 3 servers answer")
    made = b.planned(raw, b.started(b.job(), progress=None))
    assert made.status["message"] == "the learner has not pushed its weights yet"


def test_learner_message_is_kept_until_next_report() -> None:
    raw = b.job()
    first = b.planned(raw, b.started(raw, progress=b.report(phase="rollout")))
    assert b.message(first, reasons.LEARNER_RUNNING) == "the learner runs: rollout"
    silent = b.planned(b.with_status(raw, first), b.started(raw, progress=None))
    assert silent.status == first.status


def test_ownerless_child_is_reported_with_delete_command() -> None:
    job = STAGES["a name is taken"].reach()
    assert job["status"]["message"] == (
        "without an owner: Service job-3v1-rollout; a job of this name was deleted with --cascade=orphan, or"
        " `stage2 render` wrote them: kubectl delete -n team-a service/job-3v1-rollout"
    )


def test_orphaned_learner_pod_is_reported_with_delete_command() -> None:
    raw, pod = b.job(), b.learner_pod()
    pod["metadata"] |= {"ownerReferences": [], "annotations": {names.ANNOTATION_JOB_UID: raw["metadata"]["uid"]}}
    job = stages.owned(stages.Observed(pods=(pod,), secret=b.secret()), raw)
    running = conditions.find(job["status"], reasons.LEARNER_RUNNING) or {}
    assert running["reason"] == reasons.OLD_LEARNER_ENDING
    assert running["message"].endswith("may still write: kubectl delete pod job-3v1-learner-x -n team-a")


def test_drained_node_is_reported_with_uncordon_command() -> None:
    message = STAGES["its node is drained"].reach()["status"]["message"]
    assert (
        message
        == "node node-a is cordoned, as by kubectl drain: the whole job moves; kubectl uncordon node-a lets it back"
    )


APPLIED = {"kubectl.kubernetes.io/last-applied-configuration": '{"spec":{"suspend":true}}'}


@pytest.mark.parametrize(
    ("manager", "operation", "annotations", "words"),
    [
        ("kubectl-patch", "Update", {}, " (set by kubectl-patch; a file that is applied without it leaves it so)"),
        ("helm", "Update", {}, " (set by helm)"),
        ("kustomize-controller", "Apply", {}, ""),
        ("kubectl-client-side-apply", "Update", APPLIED, ""),
    ],
    ids=["by hand", "a chart, which takes it back", "a file, server-side", "a file, by the client"],
)
def test_field_manager_that_suspended_job_is_reported(
    manager: str, operation: str, annotations: dict[str, str], words: str
) -> None:
    raw = b.job(suspend=True)
    fields = {"f:spec": {"f:suspend": {}}}
    raw["metadata"]["managedFields"] = [
        {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {"f:config": {}}}},
        {"manager": manager, "operation": operation, "fieldsV1": fields},
    ]
    raw["metadata"]["annotations"] = annotations
    kept = dict(slim(names.KIND, raw))
    assert b.planned(kept).status["message"].startswith(f"spec.suspend is true{words}: no pod exists")
    assert "managedFields" not in slim(names.KIND, {**raw, "spec": {**raw["spec"], "suspend": False}})["metadata"]


ARGO = {stages.CURRENT: "Healthy", stages.IN_PROGRESS: "Progressing", stages.FAILED: "Degraded"}
_, _, SCRIPT = (ROOT / "docs" / "gitops.md").read_text(encoding="utf-8").partition("```lua\n")


def health(job: Any) -> str:
    """What Argo CD makes of a job by the script of the docs."""
    runtime = LuaRuntime(unpack_returned_tuples=True)
    assess = runtime.execute(f"return function(obj)\n{SCRIPT.partition('```')[0]}\nend")
    found = assess(runtime.table_from(job, recursive=True))
    assert found["message"] == job.get("status", {}).get("message", "no controller has seen the job")
    return str(found["status"])


@EVERY
def test_argo_cd_health_agrees_with_every_stage(name: str) -> None:
    stage = STAGES[name]
    job = stage.reach()
    wanted = "Suspended" if stage.reason == reasons.SUSPENDED_BY_SPEC else ARGO[stage.kstatus]
    assert health(job) == wanted
    assert health(b.edited(job)) == "Progressing"


def test_argo_cd_health_is_progressing_before_controller_saw_job() -> None:
    assert health(b.job()) == "Progressing"
