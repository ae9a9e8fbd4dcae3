"""Unknown keys are refused by the admission policy, and again by the controller."""

import copy
from typing import Any

import pytest

from stage2_api.admission import known_keys_policy
from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from tests.unit.api.api_server import admitted
from tests.unit.api.grpo_configs import GOOD_JOB
from tests.unit.api.wrong_jobs import good_job

POLICY = known_keys_policy()
VOLUME = {"name": "d", "mountPath": "/d", "hostPath": {"path": "/d"}}


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("spce", None),
        ("spec.lerner", "spec.learner"),
        ("spec.learner.gpu", "spec.learner.gpus"),
        ("spec.learner.resources.limit", "spec.learner.resources.limits"),
        ("spec.config.trainning", "spec.config.training"),
        ("spec.config.training.learnin_rate", "spec.config.training.learning_rate"),
        ("spec.config.custom.extra.rollout_matching.decodemode", "rollout_matching.decode_mode"),
    ],
)
def test_misspelled_key_is_refused_and_controller_suggests_right_one(path: str, near: str | None) -> None:
    raw = good_job()
    *sections, key = path.split(".")
    here: Any = raw
    for section in sections:
        here = here.setdefault(section, {})
    here[key] = {}
    assert admitted(POLICY, raw).startswith(f"{path}: not keys of stage2: ")
    with pytest.raises(ConfigError) as error:
        parse_job(raw)
    (problem,) = [str(problem) for problem in error.value.problems if problem.path == path]
    assert "is not a key of" in problem
    assert (near or "remove it") in problem


def test_unknown_key_in_list_item_is_reported_for_list() -> None:
    raw = good_job()
    raw["spec"]["volumes"] = [{**VOLUME, "hostPath": {"path": "/d", "tpye": ""}}, {**VOLUME, "name": "e", "mount": ""}]
    shown = admitted(POLICY, raw).partition(": ")[0]
    assert shown == "spec.volumes[], spec.volumes[].hostPath"


@pytest.mark.parametrize("raw", [good_job(), GOOD_JOB, {"metadata": {"name": "x"}}])
def test_known_keys_are_admitted(raw: Any) -> None:
    before = copy.deepcopy(raw)
    assert admitted(POLICY, raw) == ""
    assert raw == before


@pytest.mark.parametrize("value", [1, {"a": {"b": 1}}, [1] * 50_000], ids=["small", "nested", "huge"])
def test_unknown_top_level_key_is_refused_even_if_spec_is_unchanged(value: Any) -> None:
    old = good_job()
    assert admitted(POLICY, {**old, "junk": value}, old).startswith("junk: not keys of stage2: ")
    assert admitted(POLICY, {**old, "junk": value}, {**old, "junk": 0}).startswith("junk: not keys of stage2: ")


def test_job_stored_with_unknown_top_level_key_can_end_and_drop_it() -> None:
    """Else nobody takes the finalizer of a deletion off it, and it stays for ever."""
    job = good_job()
    old = {**job, "junk": [{"a": 1}], "more": 1}
    for metadata in ({"labels": {"a": "b"}}, {"finalizers": []}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}):
        assert admitted(POLICY, {**old, "metadata": {**job["metadata"], **metadata}}, old) == ""
    assert admitted(POLICY, {**old, "status": {"phase": "Running"}}, old) == ""
    assert admitted(POLICY, {**job, "more": 1}, old) == ""
    assert admitted(POLICY, job, old) == ""
    edited = {**job["spec"], "image": "another:1"}
    assert admitted(POLICY, {**job, "spec": edited}, old) == ""
    assert admitted(POLICY, {**old, "spec": edited}, old) == ""
    assert admitted(POLICY, {**old, "junk": [{"a": 2}], "spec": edited}, old).startswith("junk: not keys of stage2: ")


FOREIGN = {
    "in the spec": lambda spec: spec.update({"colour": "red"}),
    "in a section": lambda spec: spec["rollout"].update({"colour": "red"}),
    "in the training YAML": lambda spec: spec["config"]["training"].update({"async_save": True}),
    "in a list": lambda spec: spec.update({"volumes": [{**VOLUME, "colour": "red"}]}),
}


@pytest.mark.parametrize("where", FOREIGN)
def test_unknown_spec_key_from_other_version_does_not_block_edits(where: str) -> None:
    """A newer version has filled it in, or knew it; an older one removed it since."""
    old = good_job()
    FOREIGN[where](old["spec"])
    for key, value in (("suspend", True), ("activeDeadlineSeconds", 60), ("ttlSecondsAfterFinished", 60)):
        assert admitted(POLICY, {**old, "spec": {**old["spec"], key: value}}, old) == ""
    for edit in ({"image": "another:1"}, {"rollout": {**old["spec"]["rollout"], "port": 9000}}):
        assert admitted(POLICY, {**old, "spec": {**old["spec"], **edit}}, old) == ""
    assert ": not keys of stage2: " in admitted(POLICY, old), "a new job must not have it"
    resumed = {key: value for key, value in old["spec"].items() if key != "suspend"}
    assert admitted(POLICY, {**old, "spec": resumed}, {**old, "spec": {**old["spec"], "suspend": True}}) == ""
    assert admitted(POLICY, {**old, "spec": {**old["spec"], "suspnd": True}}, old).startswith("spec.suspnd: not keys")


@pytest.mark.parametrize("section", ["rollout", "learner"])
def test_free_form_mappings_are_not_checked(section: str) -> None:
    raw = good_job()
    raw["spec"][section]["template"] = {"spec": {"whatever": {}}}
    raw["spec"]["config"]["deepspeed"] = {"zero_optimization": {"stage": 2}}
    assert admitted(POLICY, raw) == ""
