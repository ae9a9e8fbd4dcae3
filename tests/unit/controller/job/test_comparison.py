"""Existing children beside wanted ones: whose they are, what others take away or add, and what has to be written."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.children import comparison
from stage2_controller.children.comparison import owned
from stage2_controller.job import names
from stage2_controller.report import explanation
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_kueue import ADMITTED, workload
from tests.unit.controller.place.test_placement import planned

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
def test_covers_compares_only_desired_fields(observed: Any, desired: Any, covered: bool) -> None:
    assert comparison.covers({"containers": observed}, {"containers": desired}) is covered


def test_list_without_merge_key_must_match_exactly() -> None:
    assert not comparison.covers({"command": ["a", "b"]}, {"command": ["a"]})
    assert comparison.covers({"command": ["a"]}, {"command": ["a"]})


def test_unchanged_children_cause_no_writes() -> None:
    raw = b.job()
    observed = b.started(raw)
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_missing_children_are_created() -> None:
    made = b.planned(b.job())
    verbs = [(write.verb, write.manifest["kind"]) for write in comparison.writes(made.children, b.NOTHING)]
    kinds = ("Secret", "ConfigMap", "NetworkPolicy", "Service", "Deployment", "Job")  # pods come last
    assert verbs == [("create", kind) for kind in kinds]


def written_after(field: str, *, spec: Any = None, **metadata: Any) -> list[Any]:
    """What is written of a running job of which somebody has changed a child."""
    observed = b.started(b.job())
    child = getattr(observed, field)
    changed = {**child, "metadata": {**child["metadata"], **metadata}, "spec": {**child["spec"], **(spec or {})}}
    observed = replace(observed, **{field: changed})
    return list(comparison.writes(b.planned(b.job(), observed).children, observed))


def test_terminating_child_is_left_alone() -> None:
    assert written_after("deployment", deletionTimestamp="2026-01-02T03:04:05Z") == []


def test_manual_change_to_child_is_reverted() -> None:
    (write,) = written_after("deployment", spec={"replicas": 0})
    assert (write.verb, write.manifest["kind"]) == ("apply", "Deployment")


def test_change_is_reverted_only_in_child_with_same_uid() -> None:
    (write,) = written_after("service", spec={"ports": []}, uid="uid-of-the-service")
    assert write.manifest["metadata"]["uid"] == "uid-of-the-service"  # the API server refuses it for another one


def test_learner_job_is_never_patched() -> None:
    assert written_after("learner", spec={"backoffLimit": 0}) == []


def test_job_edit_before_learner_started_updates_deployment() -> None:
    observed = replace(b.started(b.job()), learner=None)
    made = b.planned(b.job(image="my/trainer:2"), observed)
    changed = [write.manifest["kind"] for write in comparison.writes(made.children, observed)]
    assert "Deployment" in changed


def test_changed_spec_restarts_job() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(image="my/trainer:2"), observed)
    assert made.deletions == ("Job", "Deployment")
    assert b.kinds(made) == ["ConfigMap", "NetworkPolicy", "Service"]


def test_deadline_and_ttl_may_change_while_job_runs() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(activeDeadlineSeconds=9999, ttlSecondsAfterFinished=5), observed)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert comparison.writes(made.children, observed) == []


def test_new_crd_default_is_not_treated_as_edit() -> None:
    observed = b.started(b.job())
    made = b.planned(b.job(suspend=False, gpuResource="nvidia.com/gpu", imagePullPolicy="IfNotPresent"), observed)
    assert made.deletions == ()
    assert comparison.writes(made.children, observed) == []


def made_by_another_version(manifest: Any) -> Any:
    changed = copy.deepcopy(dict(manifest))
    changed["metadata"]["annotations"][names.ANNOTATION_MANIFEST_HASH] = "of-another-version"
    changed["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "NEW", "value": "1"})
    return changed


def test_controller_upgrade_does_not_restart_running_pods() -> None:
    raw = b.job()
    observed = b.started(raw)
    observed = replace(observed, deployment=made_by_another_version(observed.deployment))
    assert comparison.writes(b.planned(raw, observed).children, observed) == []


def test_network_egress_can_change_without_restarting_pods() -> None:
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


def test_orphaned_learner_pod_must_end_before_new_learner_job_is_created() -> None:
    """`kubectl delete job --cascade=orphan`: two learners would write the same checkpoints."""
    raw, left = b.job(), copy.deepcopy(b.learner_pod())
    uid = raw["metadata"]["uid"]
    left["metadata"]["annotations"] = {names.ANNOTATION_JOB: "job-3v1", names.ANNOTATION_JOB_UID: uid}
    del left["metadata"]["ownerReferences"]
    seen = replace(b.started(raw), learner=None, pods=(b.rollout_pod(True, True, True), left))
    made = b.planned(raw, owned(seen, raw["metadata"]))
    assert "Job" not in b.kinds(made)
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.OLD_LEARNER_ENDING)
    ended = {**left, "status": {**left["status"], "phase": "Succeeded"}}
    seen = replace(seen, pods=(seen.pods[0], ended))
    assert "Job" in b.kinds(b.planned(raw, owned(seen, raw["metadata"])))


def test_service_changed_to_external_name_is_reverted() -> None:
    seen = b.started(b.job())
    changed = copy.deepcopy(dict(seen.service or {}))
    changed["spec"] |= {"type": "ExternalName", "externalName": "elsewhere.example"}
    seen = replace(seen, service=changed)
    made = b.planned(b.job(), seen)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert [write.manifest["kind"] for write in comparison.writes(made.children, seen)] == ["Service"]


def test_resource_claim_added_by_webhook_does_not_disturb_running_job() -> None:
    seen = b.started(b.job())
    with_claim = copy.deepcopy(dict(seen.pods[0]))
    with_claim["spec"]["resourceClaims"] = [{"name": "shared", "resourceClaimName": "of-the-team"}]
    made = b.planned(b.job(), replace(seen, pods=(with_claim, *seen.pods[1:])))
    assert made.status["phase"] == "Running"


def _answered(made: Any) -> list[str]:
    return [item["type"] for item in (made.workload_patch or {}).get("status", {}).get("conditions", [])]


def test_job_without_its_former_queue_label_releases_quota_when_it_ends() -> None:
    raw = b.job()
    seen = b.started(raw, workload=workload(*ADMITTED))
    done = {**dict(seen.learner or {}), "status": {"conditions": [b.job_condition("Complete")]}}
    made = b.planned(raw, replace(seen, learner=done))
    assert made.status["phase"] == "Succeeded"
    assert "Finished" in _answered(made)


def test_job_without_its_former_queue_label_releases_quota_when_suspended() -> None:
    seen = Observed(workload=workload(*ADMITTED))
    assert b.planned(b.job(suspend=True), seen).deletions == ("Workload",)


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


def test_owned_children_are_adopted_and_no_obstacle() -> None:
    raw = b.job()
    observed = b.started(raw)
    assert seen(raw, observed) == observed
    assert comparison.obstacle(observed, "team-a") is None


@pytest.mark.parametrize("end", [COMPLETE, b.job_condition("Failed", "BackoffLimitExceeded")])
def test_recreated_job_does_not_inherit_result_of_old_learner(end: Any) -> None:
    raw = b.job()
    ended = b.started(raw, learner=b.learner_job(b.planned(raw, b.started(raw)), end), deployment=None, pods=())
    made = b.planned(again(raw), seen(again(raw), ended))
    assert b.condition(made, reasons.CHILDREN_APPLIED) == ("False", reasons.OLD_CHILDREN_ENDING)
    assert "Job job-3v1-learner" in b.message(made, reasons.CHILDREN_APPLIED)
    assert (made.status["phase"], made.children, made.deletions) == (reasons.PENDING, (), ())
    assert made.again_after_s == 2


def test_configuration_error_of_old_jobs_server_does_not_fail_recreated_job() -> None:
    raw = b.job()
    refused = marked(b.pod(names.ROLE_ROLLOUT, b.down("server-0", 64, "no such model")), raw["metadata"]["uid"])
    found = seen(again(raw), Observed(pods=(refused,)))
    assert found.leaving == ("Pod job-3v1-rollout-x",)
    assert b.condition(b.planned(again(raw), found), reasons.FAILED) is None


def test_pod_templates_carry_uid_of_job() -> None:
    raw = b.job()
    made = b.planned(raw, b.pods_alone(b.rollout_pod(True, True, True)))
    templates = [b.child(made, kind)["spec"]["template"] for kind in ("Deployment", "Job")]
    reported = [template["metadata"]["annotations"][names.ANNOTATION_JOB_UID] for template in templates]
    assert reported == [raw["metadata"]["uid"]] * 2


def test_pods_without_job_uid_belong_to_existing_deployment_and_job() -> None:
    raw = b.job()
    raw["metadata"]["creationTimestamp"] = "2026-01-02T04:00:00Z"  # later than its pods: the account of their parents
    assert len(seen(raw, b.started(raw)).pods) == 2
    orphaned = replace(b.started(raw), deployment=None, learner=None)
    assert seen(raw, orphaned).pods == ()
    assert len(seen(raw, orphaned).leaving) == 2


FOREIGN = ("ConfigMap", "Secret", "Service", "Deployment", "NetworkPolicy")


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("change", ["no owner", "another kind of owner", "another job"])
def test_foreign_object_with_childs_name_is_neither_read_nor_overwritten(kind: str, change: str) -> None:
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
    if change == "no owner":
        wanted = (
            f"without an owner: {name}; a job of this name was deleted with --cascade=orphan, or `stage2 render` wrote"
            f" them: kubectl delete -n team-a {name.replace(' ', '/').lower()}"
        )
    assert b.message(made, reasons.CHILDREN_APPLIED) == wanted
    assert made.status["message"] == wanted
    assert made.again_after_s == 15


def test_job_with_taken_child_name_claims_no_node() -> None:
    raw = b.job()
    found = seen(raw, Observed(configmap=without_owner(b.child(b.planned(raw), "ConfigMap"))))
    made = planned(raw, n.capacity(n.node()), found)
    assert (made.placement, made.keeps_place) == (None, False)


def test_running_job_keeps_node_and_pods_when_child_name_is_taken() -> None:
    raw = b.job()
    found = seen(raw, b.started(raw, service=without_owner(b.child(b.planned(raw), "Service"))))
    made = planned(raw, n.capacity(n.node()), found)
    assert (made.status["phase"], made.children, made.deletions) == (reasons.RUNNING, (), ())
    assert made.placement is not None


def test_suspended_job_deletes_its_pods_even_when_child_name_is_taken() -> None:
    raw = b.job(suspend=True)
    found = seen(raw, b.started(b.job(), service=without_owner(b.child(b.planned(b.job()), "Service"))))
    assert b.planned(raw, found).deletions == ("Job", "Deployment")


def test_explain_names_object_that_occupies_child_name() -> None:
    raw = b.job()
    made = b.planned(raw, seen(raw, Observed(configmap=without_owner(b.child(b.planned(raw), "ConfigMap")))))
    first = next(step for step in explanation.chain(b.with_status(raw, made)) if step.state != "ok")
    assert (first.name, first.state, first.reason) == ("children", "wrong", reasons.NAME_TAKEN)
    assert first.fix == "metadata.name of rmj/job-3v1, or the object that the message names, in namespace team-a"
    assert b.condition(made, reasons.TRAINING) == ("False", reasons.NAME_TAKEN)
