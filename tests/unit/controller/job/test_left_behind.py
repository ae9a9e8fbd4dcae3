"""What others take away from a job that runs, or add to it: its passes go on, and nothing starts twice."""

import copy
from dataclasses import replace
from typing import Any

from stage2_controller import reasons
from stage2_controller.children import comparison
from stage2_controller.children.comparison import owned
from stage2_controller.observed import Observed
from stage2_controller.spec import names
from tests.unit.controller import builders as b
from tests.unit.controller.job import test_service_members as members
from tests.unit.controller.job.test_kueue import ADMITTED, workload


def test_a_learner_whose_job_was_deleted_without_it_is_waited_for() -> None:
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


def test_a_service_that_was_made_to_name_another_host_is_made_what_it_was() -> None:
    seen = members.observed(members.server_pod())
    changed = copy.deepcopy(dict(seen.service or {}))
    del changed["spec"]["ipFamilies"]
    changed["spec"] |= {"type": "ExternalName", "externalName": "elsewhere.example"}
    seen = replace(seen, service=changed)
    made = b.planned(b.job(), seen)
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)
    assert [write.manifest["kind"] for write in comparison.writes(made.children, seen)] == ["Service"]


def test_a_claim_that_a_webhook_adds_by_its_name_is_no_claim_to_be_made() -> None:
    seen = b.started(b.job())
    with_claim = copy.deepcopy(dict(seen.pods[0]))
    with_claim["spec"]["resourceClaims"] = [{"name": "shared", "resourceClaimName": "of-the-team"}]
    made = b.planned(b.job(), replace(seen, pods=(with_claim, *seen.pods[1:])))
    assert made.status["phase"] == "Running"


def test_an_object_of_others_under_one_name_keeps_no_address_from_the_service() -> None:
    seen = members.observed(members.server_pod(), foreign=("NetworkPolicy job-3v1-pods",))
    made = b.planned(b.job(), seen)
    assert b.condition(made, reasons.CHILDREN_APPLIED) == ("False", reasons.NAME_TAKEN)
    assert made.slices


def _answered(made: Any) -> list[str]:
    return [item["type"] for item in (made.workload_patch or {}).get("status", {}).get("conditions", [])]


def test_a_job_whose_queue_label_went_while_it_had_quota_gives_it_back_at_its_end() -> None:
    raw = b.job()
    seen = b.started(raw, workload=workload(*ADMITTED))
    done = {**dict(seen.learner or {}), "status": {"conditions": [b.job_condition("Complete")]}}
    made = b.planned(raw, replace(seen, learner=done))
    assert made.status["phase"] == "Succeeded"
    assert "Finished" in _answered(made)


def test_a_job_whose_queue_label_went_while_it_had_quota_gives_it_back_when_it_is_suspended() -> None:
    seen = Observed(workload=workload(*ADMITTED))
    made = {
        write.manifest["kind"]: write
        for write in comparison.writes(b.planned(b.job(suspend=True), seen).children, seen)
    }
    assert made["Workload"].manifest["spec"]["active"] is False
