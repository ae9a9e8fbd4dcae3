"""A child is the job's by its owner's uid, never by its name: not a deleted job's of that name, nor a stranger's."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.observed import Observed
from stage2_controller.report import explanation
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_placement import planned

COMPLETE = b.job_condition("Complete")


def again(raw: Any) -> Any:
    """The job, deleted and applied again."""
    metadata = {**raw["metadata"], "uid": "uid-of-the-next", "creationTimestamp": "2026-01-02T04:00:00Z"}
    return {**raw, "metadata": metadata}


def without_owner(child: Any) -> Any:
    made = copy.deepcopy(child)
    del made["metadata"]["ownerReferences"]
    return made


def owned_by(child: Any, **fields: Any) -> Any:
    made = copy.deepcopy(child)
    made["metadata"]["ownerReferences"][0] |= fields
    return made


def marked(pod: Any, uid: str) -> Any:
    metadata = {**pod["metadata"], "annotations": {names.ANNOTATION_JOB_UID: uid}}
    return {**pod, "metadata": metadata}


def seen(raw: Any, observed: Observed) -> Observed:
    return comparison.owned(observed, raw["metadata"])


def test_what_the_job_owns_is_its_own_and_nothing_is_in_its_way() -> None:
    raw = b.job()
    observed = b.started(raw)
    assert seen(raw, observed) == observed
    assert comparison.obstacle(observed) is None


@pytest.mark.parametrize("end", [COMPLETE, b.job_condition("Failed", "BackoffLimitExceeded")])
def test_a_job_that_is_applied_again_does_not_inherit_the_end_of_the_one_before(end: Any) -> None:
    raw = b.job()
    ended = b.started(raw, learner=b.learner_job(b.planned(raw, b.started(raw)), end), deployment=None, pods=())
    made = b.planned(again(raw), seen(again(raw), ended))
    assert b.condition(made, reasons.CHILDREN_APPLIED) == ("False", reasons.OLD_CHILDREN_ENDING)
    assert "Job job-3v1-learner" in b.message(made, reasons.CHILDREN_APPLIED)
    assert (made.status["phase"], made.children, made.deletions) == (reasons.PENDING, (), ())
    assert made.again_after_s == 2


def test_a_server_of_the_job_before_that_refused_its_configuration_does_not_fail_the_next() -> None:
    raw = b.job()
    refused = marked(b.pod(names.ROLE_ROLLOUT, b.down("server-0", 64, "no such model")), raw["metadata"]["uid"])
    found = seen(again(raw), Observed(pods=(refused,)))
    assert found.leaving == ("Pod job-3v1-rollout-x",)
    assert b.condition(b.planned(again(raw), found), reasons.FAILED) is None


def test_once_the_old_children_are_gone_the_job_begins() -> None:
    made = b.planned(again(b.job()), seen(again(b.job()), b.NOTHING))
    assert b.kinds(made) == ["Secret", "ConfigMap", "NetworkPolicy", "Service", "Deployment", "Job"]


def test_every_pod_says_by_its_uid_which_job_it_is_of() -> None:
    raw = b.job()
    made = b.planned(raw, Observed(pods=(b.rollout_pod(True, True, True),)))
    templates = [b.child(made, kind)["spec"]["template"] for kind in ("Deployment", "Job")]
    told = [template["metadata"]["annotations"][names.ANNOTATION_JOB_UID] for template in templates]
    assert told == [raw["metadata"]["uid"]] * 2


def test_pods_from_before_an_upgrade_are_those_of_their_deployment_and_job() -> None:
    raw = b.job()
    raw["metadata"]["creationTimestamp"] = "2026-01-02T04:00:00Z"  # later than its pods: the account of their parents
    assert len(seen(raw, b.started(raw)).pods) == 2
    orphaned = replace(b.started(raw), deployment=None, learner=None)
    assert seen(raw, orphaned).pods == ()
    assert len(seen(raw, orphaned).leaving) == 2


FOREIGN = ("ConfigMap", "Secret", "Service", "Deployment", "NetworkPolicy")


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("change", ["no owner", "another kind of owner", "another job"])
def test_an_object_that_is_not_the_jobs_is_neither_read_nor_written_over(kind: str, change: str) -> None:
    raw = b.job()
    child = b.child(b.planned(raw), kind)
    there = {
        "no owner": without_owner(child),
        "another kind of owner": owned_by(child, kind="Application", apiVersion="example.com/v1"),
        "another job": owned_by(child, name="other", uid="uid-of-other"),
    }[change]
    found = seen(raw, Observed(**{"networkpolicy": None, kind.lower(): there}))
    made = b.planned(raw, found)
    assert found.child(kind) is None
    assert made.children == ()
    name = f"{kind} {there['metadata']['name']}"
    wanted = f"{name} exists and is not this job's; rename the job or the object"
    assert b.message(made, reasons.CHILDREN_APPLIED) == wanted
    assert made.status["message"] == wanted
    assert made.again_after_s == 15


def test_a_job_whose_name_is_taken_claims_no_node() -> None:
    raw = b.job()
    found = seen(raw, Observed(configmap=without_owner(b.child(b.planned(raw), "ConfigMap"))))
    made = planned(raw, n.capacity(n.node()), found)
    assert (made.placement, made.keeps_place) == (None, False)


def test_a_running_job_keeps_its_place_and_its_pods_when_somebody_takes_a_childs_name() -> None:
    raw = b.job()
    found = seen(raw, b.started(raw, service=without_owner(b.child(b.planned(raw), "Service"))))
    made = planned(raw, n.capacity(n.node()), found)
    assert (made.status["phase"], made.children, made.deletions) == (reasons.RUNNING, (), ())
    assert made.placement is not None


def test_a_suspended_job_ends_its_pods_although_a_name_is_taken() -> None:
    raw = b.job(suspend=True)
    found = seen(raw, b.started(b.job(), service=without_owner(b.child(b.planned(b.job()), "Service"))))
    assert b.planned(raw, found).deletions == ("Job", "Deployment")


def test_of_two_jobs_whose_pods_would_have_one_label_the_later_one_waits() -> None:
    """One is called what the other's name was cut to: each one's NetworkPolicy would open the other's pods."""
    job = b.job(name="1.big")["metadata"] | {"uid": "1", "creationTimestamp": "2026-01-02T03:04:05Z"}
    other = {"metadata": {"name": names.short_name("1.big"), "uid": "2", "creationTimestamp": "2026-01-02T03:04:06Z"}}
    assert comparison.obstacle(comparison.after_namesakes(b.NOTHING, job, [other])) is None
    told = comparison.obstacle(comparison.after_namesakes(b.NOTHING, other["metadata"], [{"metadata": job}]))
    assert told is not None
    assert told.reason == reasons.NAME_TAKEN
    assert told.message == "RolloutMatchingJob 1.big exists and is not this job's; rename the job or the object"


def test_explain_names_the_object_that_is_in_the_way() -> None:
    raw = b.job()
    made = b.planned(raw, seen(raw, Observed(configmap=without_owner(b.child(b.planned(raw), "ConfigMap")))))
    first = next(step for step in explanation.chain(b.told(raw, made)) if step.state != "ok")
    assert (first.name, first.state, first.reason) == ("children", "wrong", reasons.NAME_TAKEN)
    assert first.fix == "metadata.name of rmj/job-3v1, or the object that the message names, in namespace team-a"
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.NAME_TAKEN)
