"""Labels that somebody takes from the pods of a job, or writes otherwise: the run goes on, and it is said."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_controller.job import names
from stage2_controller.report import explanation
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_evictions import observed_jobset
from tests.unit.controller.job.test_jobset import job as jobset_job
from tests.unit.controller.place.test_placement import placed, planned

DAY_S = 86_400.0
ROLES = (names.ROLE_ROLLOUT, names.ROLE_LEARNER)


def without_labels(pod: b.Object) -> b.Object:
    return {**pod, "metadata": {**pod["metadata"], "labels": {}}}


def unseen(seen: Observed, role: str, *, in_store: bool) -> Observed:
    """What is observed once a pod has lost its labels: the watch has it no more, or it is not known whose it is."""
    pods = {names.ROLE_ROLLOUT: b.rollout_pod(True, True, True), names.ROLE_LEARNER: b.learner_pod()}
    lost = without_labels(pods.pop(role))
    deployment = {**(seen.deployment or {}), "status": {"replicas": 1, "readyReplicas": 1}}
    learner = {**(seen.learner or {}), "status": {"active": 1, "ready": 1}}
    kept = (*pods.values(), *((lost,) if in_store else ()))
    return replace(seen, deployment=deployment, learner=learner, pods=kept, progress=None)


@pytest.mark.parametrize("in_store", [False, True], ids=["all labels", "its role"])
@pytest.mark.parametrize("role", ROLES)
def test_relabelled_pod_is_reported_and_run_continues(role: str, in_store: bool) -> None:
    """After 100 s the whole job was moved, and its learner ended."""
    account = n.capacity(n.node())
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    lost = unseen(seen, role, in_store=in_store)
    for at_s in (1.0, 200.0, DAY_S):
        made = planned(raw, account, lost, after_s=at_s)
        assert made.deletions == ()
        assert b.condition(made, reasons.FAILED) is None
        assert b.condition(made, reasons.PLACED) == ("True", reasons.NODE_CHOSEN)
        kind = reasons.ROLLOUT_READY if role == names.ROLE_ROLLOUT else reasons.LEARNER_RUNNING
        assert b.condition(made, kind) == ("False", reasons.LABELS_LOST)
        raw = b.with_status(raw, made)
    step = explanation.first(explanation.chain(raw))
    assert step.reason == reasons.LABELS_LOST
    label = f"{names.LABEL_JOB}=job-3v1 {names.LABEL_ROLE}={role} {names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    assert "kubectl label pods -n team-a --overwrite -l" in step.message
    assert label in step.message


def test_learner_without_labels_still_completes_its_job() -> None:
    account = n.capacity(n.node())
    raw, seen = b.job(), placed(b.job(), account)
    raw = b.with_status(raw, planned(raw, account, seen))
    done = unseen(seen, names.ROLE_LEARNER, in_store=False)
    done = replace(done, learner={**(done.learner or {}), "status": {"conditions": [b.job_condition("Complete")]}})
    assert planned(raw, account, done).status["phase"] == reasons.SUCCEEDED


def test_newly_created_pod_not_yet_seen_does_not_count_as_unlabelled() -> None:
    raw = b.job()
    raw = b.with_status(raw, b.planned(raw))
    seen = unseen(b.created(b.planned(raw)), names.ROLE_LEARNER, in_store=False)
    made = b.planned(raw, replace(seen, pods=()))
    assert b.condition(made, reasons.LEARNER_RUNNING) == ("False", reasons.NOT_CREATED)
    assert b.condition(made, reasons.ROLLOUT_READY) == ("False", reasons.NOT_CREATED)


WRONG: list[Any] = ["x", "", "-1", "1.5", "٣", "9" * 5000, "0x1"]


@pytest.mark.parametrize("label", [names.LABEL_POD_INDEX, names.LABEL_JOB_INDEX])
@pytest.mark.parametrize("value", WRONG)
def test_invalid_pod_index_label_does_not_block_deadline_or_ttl(label: str, value: str) -> None:
    """Each pass met a bug, and neither deadline nor time to live came."""
    raw = jobset_job(activeDeadlineSeconds=60, ttlSecondsAfterFinished=5)
    seen = observed_jobset(raw)
    for pod in seen.pods:
        pod["metadata"]["labels"] = {**pod["metadata"]["labels"], label: value}
    raw = b.with_status(raw, b.planned(raw, seen))
    late = b.planned(raw, seen, after_s=61)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)
    assert b.planned(b.with_status(raw, late), seen, after_s=70).delete_job


def test_overwritten_pod_index_label_is_read_from_annotation() -> None:
    raw = jobset_job()
    seen = observed_jobset(raw)
    plain = b.planned(raw, seen).status["servers"]
    for number, pod in enumerate(seen.pods[:2]):
        pod["metadata"]["annotations"] = {names.LABEL_POD_INDEX: str(number)}
        pod["metadata"]["labels"] = {**pod["metadata"]["labels"], names.LABEL_POD_INDEX: "x"}
    assert b.planned(raw, seen).status["servers"] == plain
