"""Keys that this version does not know are ignored where no author wrote them, and refused where one did."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_controller.children.build import parse
from stage2_controller.job.authorship import LAST_APPLIED, without_filled_in
from stage2_controller.state import reasons
from tests.unit.controller import builders as b

Fill = Callable[[Any], Any]
FILLED: dict[str, tuple[str, Fill]] = {
    "in the spec": ("spec.colour", lambda spec: spec.update(colour="red")),
    "a section": ("spec.paint", lambda spec: spec.update(paint={"colour": "red"})),
    "in a section": ("spec.rollout.colour", lambda spec: spec["rollout"].update(colour="red")),
    "in the training YAML": (
        "spec.config.training.colour",
        lambda spec: spec["config"]["training"].update(colour="red"),
    ),
    "in a list": ("spec.volumes[0].colour", lambda spec: spec["volumes"][0].update(colour="red")),
    "below a list": (
        "spec.volumes[0].emptyDir.colour",
        lambda spec: spec["volumes"][0]["emptyDir"].update(colour="red"),
    ),
}


def fields(value: Any) -> Any:
    """What a manager that sent a value owns of it (fieldsV1)."""
    if isinstance(value, dict):
        return {".": {}, **{f"f:{key}": fields(one) for key, one in value.items()}}
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        return {f"k:{json.dumps({'name': one['name']})}": fields(one) for one in value}
    return {}


def managed(manager: str, operation: str, spec: Any) -> Any:
    return {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": fields(spec)}}


STATUS = {"manager": "stage2", "operation": "Apply", "subresource": "status", "fieldsV1": {"f:status": {}}}


def by_client_side_apply(written: Any, stored: Any) -> Any:
    """kubectl's entry also owns what the API server filled in when the job was created."""
    entries = [managed("kubectl-client-side-apply", "Update", stored), STATUS]
    return {"annotations": {LAST_APPLIED: json.dumps({"spec": written})}, "managedFields": entries}


def by_server_side_apply(written: Any, stored: Any) -> Any:
    return {"managedFields": [managed("kubectl", "Apply", written), STATUS]}


def by_server_side_apply_after_an_edit(written: Any, stored: Any) -> Any:
    edited = managed("kubectl-edit", "Update", {"activeDeadlineSeconds": 60})
    return {"managedFields": [managed("argocd", "Apply", written), edited, STATUS]}


def by_create_before_the_definition_had_it(written: Any, stored: Any) -> Any:
    return {"managedFields": [managed("kubectl-create", "Update", written), STATUS]}


TOLD = (
    by_client_side_apply,
    by_server_side_apply,
    by_server_side_apply_after_an_edit,
    by_create_before_the_definition_had_it,
)


def job(where: str, who: Callable[[Any, Any], Any], *, written: bool = False, **spec: Any) -> b.Object:
    """A job that has an unknown key, which its author wrote or not."""
    raw = b.job(volumes=[{"name": "data", "mountPath": "/data", "emptyDir": {}}], **spec)
    stored = copy.deepcopy(raw["spec"])
    FILLED[where][1](stored)
    raw["metadata"] |= who(stored if written else raw["spec"], stored)
    return {**raw, "spec": stored}


@pytest.mark.parametrize("where", FILLED)
@pytest.mark.parametrize("who", TOLD)
def test_key_without_author_is_ignored_with_condition(where: str, who: Callable[[Any, Any], Any]) -> None:
    raw = job(where, who)
    before = copy.deepcopy(raw)
    made = b.planned(raw)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.KEYS_IGNORED)
    assert b.message(made, reasons.ACCEPTED).startswith(f"ignored: {FILLED[where][0]}; ")
    assert b.kinds(made) == b.kinds(b.planned(b.job()))
    assert raw == before, "what the store holds stays"


@pytest.mark.parametrize("where", FILLED)
@pytest.mark.parametrize("who", [by_client_side_apply, by_server_side_apply])
def test_key_written_by_author_is_refused(where: str, who: Callable[[Any, Any], Any]) -> None:
    made = b.planned(job(where, who, written=True))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert b.message(made, reasons.ACCEPTED).startswith(f"{FILLED[where][0]}: ")


@pytest.mark.parametrize("where", FILLED)
def test_manual_edit_makes_author_responsible_for_key(where: str) -> None:
    raw = job(where, by_client_side_apply)
    raw["metadata"]["managedFields"].append(managed("kubectl-edit", "Update", raw["spec"]))
    assert b.condition(b.planned(raw), reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)


@pytest.mark.parametrize(
    "metadata",
    [{}, {"managedFields": []}, {"annotations": {LAST_APPLIED: "no JSON"}, "managedFields": []}],
    ids=["a file", "no managers", "a broken annotation"],
)
def test_key_without_ownership_information_counts_as_written_by_author(metadata: Any) -> None:
    raw = job("in a section", lambda *_: metadata)
    assert without_filled_in(raw) == (raw, ())


def test_misspelled_key_beside_ignored_key_is_still_refused() -> None:
    raw = job("in a section", by_server_side_apply)
    raw["spec"]["lerner"] = {}
    raw["metadata"]["managedFields"].append(managed("kubectl-patch", "Update", {"lerner": {}}))
    with pytest.raises(ConfigError, match=r"^spec\.lerner: ") as error:
        parse(raw, b.SETTINGS)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize("where", FILLED)
def test_job_with_ignored_key_runs_suspends_resumes_and_ends(where: str) -> None:
    raw = job(where, by_client_side_apply)
    first = b.planned(raw)
    observed = b.started(raw)
    raw = b.with_status(raw, first)
    runs = b.planned(raw, observed)
    assert (runs.deletions, runs.status["phase"]) == ((), reasons.RUNNING)
    raw = b.with_status(raw, runs)
    stops = b.planned(b.edited(raw, suspend=True), observed)
    assert (stops.deletions, stops.status["phase"]) == (("Job", "Deployment"), reasons.SUSPENDED)
    resumed = b.planned(b.edited(b.with_status(b.edited(raw, suspend=True), stops), suspend=False))
    assert b.condition(resumed, reasons.ACCEPTED) == ("True", reasons.KEYS_IGNORED)
    assert "Job" in b.kinds(resumed)
    late = b.planned(b.edited(raw, activeDeadlineSeconds=60), observed, after_s=600)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)


def test_ignored_key_that_becomes_known_restarts_no_pod() -> None:
    """What was written is the same for both."""
    raw = job("in a section", by_server_side_apply)
    known = {**raw, "spec": {**raw["spec"], "rollout": b.job()["spec"]["rollout"]}}
    ignoring, knowing = parse(raw, b.SETTINGS), parse(known, b.SETTINGS)
    assert (ignoring.ignored, knowing.ignored) == (("spec.rollout.colour",), ())
    assert ignoring.current_hash == knowing.current_hash
