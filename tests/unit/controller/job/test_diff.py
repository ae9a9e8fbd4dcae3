"""Which children are written: none in a steady state; drift is mended, late edits and upgrades are not."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.spec import names
from tests.unit.controller import builders as b

CASES: list[tuple[str, Any, Any, bool]] = [
    ("equal values", {"a": 1}, {"a": 1}, True),
    ("defaults that the server added", {"a": 1, "b": 2}, {"a": 1}, True),
    ("a changed value", {"a": 2}, {"a": 1}, False),
    ("a removed value", {}, {"a": 1}, False),
    ("empty values that the server left out", {}, {"a": {}, "b": "", "c": False, "d": [], "e": {"f": ""}}, True),
    ("a quantity in another form", {"cpu": "1"}, {"cpu": "1000m"}, True),
    ("another quantity", {"memory": "2Gi"}, {"memory": "1Gi"}, False),
    ("true is not one", {"a": True}, {"a": 1}, False),
    ("nor is one true", {"a": 1}, {"a": True}, False),
    ("zero is not false", {"a": 0}, {"a": False}, False),
    ("true is true", {"a": True}, {"a": True}, True),
    ("a number in another form", {"a": 1.0}, {"a": 1}, True),
    ("a sidecar that someone injected", [{"name": "a"}, {"name": "x"}], [{"name": "a"}], True),
    ("a changed container", [{"name": "a", "image": "2"}], [{"name": "a", "image": "1"}], False),
]


@pytest.mark.parametrize(
    ("observed", "desired", "covered"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_covers(observed: Any, desired: Any, covered: bool) -> None:
    assert comparison.covers({"containers": observed}, {"containers": desired}) is covered


def test_a_list_without_a_key_has_to_be_the_same() -> None:
    assert not comparison.covers({"command": ["a", "b"]}, {"command": ["a"]})
    assert comparison.covers({"command": ["a"]}, {"command": ["a"]})


def test_a_steady_state_writes_nothing() -> None:
    raw = b.job()
    observed = b.started(raw)
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_absent_children_are_created() -> None:
    made = b.planned(b.job())
    verbs = [(write.verb, write.manifest["kind"]) for write in comparison.writes(made.children, b.NOTHING)]
    kinds = ("Secret", "ConfigMap", "NetworkPolicy", "Service", "Deployment", "Job")  # pods come last
    assert verbs == [("create", kind) for kind in kinds]


def test_a_child_on_its_way_out_is_left_alone_until_it_is_gone() -> None:
    raw = b.job()
    observed = b.started(raw)
    leaving = copy.deepcopy(observed.deployment)
    assert leaving is not None
    leaving["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    observed = replace(observed, deployment=leaving)
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_what_someone_changed_in_a_child_is_mended() -> None:
    raw = b.job()
    observed = b.started(raw)
    changed = copy.deepcopy(dict(observed.deployment or {}))
    changed["spec"]["replicas"] = 0
    observed = replace(observed, deployment=changed)
    (write,) = comparison.writes(b.planned(raw, observed).children, observed)
    assert (write.verb, write.manifest["kind"]) == ("apply", "Deployment")


def test_a_child_is_mended_only_as_long_as_it_is_the_one_that_was_seen() -> None:
    raw = b.job()
    observed = b.started(raw)
    changed = copy.deepcopy(dict(observed.service or {}))
    changed["spec"]["ports"][0]["port"] = 1
    changed["metadata"]["uid"] = "uid-of-the-service"
    (write,) = comparison.writes(b.planned(raw, observed).children, replace(observed, service=changed))
    assert write.manifest["metadata"]["uid"] == "uid-of-the-service"  # the API server refuses it for another one


def test_the_learner_job_is_never_written_again() -> None:
    raw = b.job()
    observed = b.started(raw)
    changed = copy.deepcopy(dict(observed.learner or {}))
    changed["spec"]["backoffLimit"] = 0
    observed = replace(observed, learner=changed)
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_an_edit_before_the_learner_started_is_carried_out() -> None:
    observed = replace(b.started(b.job()), learner=None)
    made = b.planned(b.job(image="my/trainer:2"), observed)
    changed = [write.manifest["kind"] for write in comparison.writes(made.children, observed)]
    assert "Deployment" in changed


def test_a_job_that_was_edited_while_it_was_suspended_starts_anew() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(image="my/trainer:2"), observed)
    assert made.deletions == ("Job", "Deployment")
    assert b.kinds(made) == ["ConfigMap", "NetworkPolicy", "Service"]


def test_suspend_deadline_and_time_to_live_may_change_at_any_time() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(activeDeadlineSeconds=9999, ttlSecondsAfterFinished=5), observed)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert comparison.writes(made.children, observed) == []


def test_a_default_that_a_newer_definition_adds_is_no_edit() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(suspend=False, gpuResource="nvidia.com/gpu", imagePullPolicy="IfNotPresent"), observed)
    assert made.deletions == ()
    assert comparison.writes(made.children, observed) == []


def made_by_another_version(manifest: Any) -> Any:
    changed = copy.deepcopy(dict(manifest))
    changed["metadata"]["annotations"][names.ANNOTATION_MANIFEST_HASH] = "of-another-version"
    changed["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "NEW", "value": "1"})
    return changed


def test_running_pods_do_not_notice_an_upgrade_of_the_controller() -> None:
    raw = b.job()
    observed = b.started(raw)
    observed = replace(observed, deployment=made_by_another_version(observed.deployment))
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_another_way_out_is_opened_and_closed_while_pods_run_and_they_do_not_notice() -> None:
    observed = b.started(b.job())
    for egress in ("Open", "Closed"):
        made = b.planned(b.job(network={"egress": egress}), observed)
        (write,) = comparison.writes(made.children, observed)
        assert (write.manifest["kind"], "Egress" in write.manifest["spec"]["policyTypes"]) == (
            "NetworkPolicy",
            egress == "Closed",
        )
        observed = replace(observed, networkpolicy=write.manifest)
    assert not made.deletions
    (back,) = comparison.writes(b.planned(b.job(), observed).children, observed)
    assert back.manifest["kind"] == "NetworkPolicy"
