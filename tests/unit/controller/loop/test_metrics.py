"""What the controller exports of its jobs: computed from the store at each scrape, with few values for every label."""

import copy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stage2_api.job import LearnerSpec, RolloutSpec
from stage2_controller.job import names
from stage2_controller.loop.metrics import Metrics
from stage2_controller.state import reasons
from stage2_controller.state.observed import Observed
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.job.test_upgrades import NARROW, WIDE

OF_JOB = {"namespace": "team-a", "name": "job-3v1"}
Figures = dict[str, list[tuple[dict[str, str], float]]]


def figures(job: Any, *pods: Any, report_age_s: float | None = None) -> Figures:
    """The figures of a job, as Prometheus reads them: the labels besides its name, and the value."""
    store = Store()
    store.put(names.KIND, job)
    for pod in pods:
        own = {"resourceVersion": "1", "annotations": {names.ANNOTATION_JOB: "job-3v1"}}
        store.put("Pod", {**pod, "metadata": {**pod["metadata"], **own}})
    metrics = Metrics(store, lambda key: report_age_s if key == n.KEY else None)
    found: Figures = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            more = {key: value for key, value in sample.labels.items() if (key, value) not in OF_JOB.items()}
            found.setdefault(sample.name, []).append((more, sample.value))
    return found


def seen(observed: Observed, **spec: Any) -> Any:
    """A job with the status of a pass that observes this."""
    return b.with_status(raw := b.job(**spec), b.planned(raw, observed))


def problems(job: Any) -> set[tuple[str, str]]:
    found = figures(job).get("stage2_job_problem", [])
    assert all(value == 1 for _, value in found)
    return {(labels["condition"], labels["reason"]) for labels, _ in found}


@pytest.mark.parametrize(
    ("job", "phase", "reason"),
    [
        (b.job(), "New", ""),
        (seen(b.NOTHING, suspend=True), "Suspended", reasons.SUSPENDED_BY_SPEC),
        (seen(b.created(b.planned(b.job()), pods=(b.rollout_pod(False),))), "Starting", reasons.SERVERS_LOADING),
        (seen(b.started(b.job())), "Running", reasons.TRAINS),
        (seen(b.completed(b.job())), "Succeeded", reasons.LEARNER_SUCCEEDED),
        (b.with_status(raw := b.job(learner=3), b.planned(raw)), "Failed", reasons.INVALID_SPEC),
    ],
    ids=["new", "suspended", "starting", "running", "succeeded", "invalid"],
)
def test_phase_metric_has_reason_why_job_does_not_train(job: Any, phase: str, reason: str) -> None:
    assert figures(job)["stage2_job_phase"] == [({"phase": phase, "reason": reason}, 1)]


def test_training_or_finished_job_exports_no_problem() -> None:
    assert problems(seen(b.started(b.job()))) == set()
    assert problems(seen(b.completed(b.job()))) == set()
    assert problems(seen(b.NOTHING, suspend=True)) == set()


def test_all_problems_of_job_are_exported() -> None:
    raw = b.job(**WIDE)
    observed = b.started(raw, progress=None, unreachable="no route to host")
    refused = b.plan(b.with_status(raw, b.planned(raw, observed)), observed, settings=NARROW)
    found = problems(b.with_status(raw, refused))
    assert (reasons.ACCEPTED, reasons.NO_LONGER_VALID) in found
    assert (reasons.LEARNER_REACHABLE, reasons.LEARNER_UNREACHABLE) in found


SERVERS, LEARNER = b.rollout_pod(True, True, True), b.learner_pod()
LEAVING = copy.deepcopy(LEARNER)
LEAVING["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("pods", "gpus"),
    [
        ((), 0),
        ((b.pod(names.ROLE_ROLLOUT, node=None), LEARNER), 1),
        ((SERVERS, LEARNER), 4),
        ((SERVERS, LEAVING), 4),
        ((SERVERS, b.pod(names.ROLE_LEARNER, b.down("learner", 0), phase="Succeeded")), 3),
        ((b.pod("another"),), 0),
    ],
    ids=["no pod", "half", "all", "one that ends", "one that has ended", "of no role"],
)
def test_gpus_held_counts_only_pods_with_node(pods: Any, gpus: int) -> None:
    assert figures(b.job(), *pods)["stage2_job_gpus_held"] == [({}, gpus)]


def test_cpu_job_holds_no_gpus_unless_it_claims_them() -> None:
    on_cpu = b.job(gpuResource="")
    assert figures(on_cpu, SERVERS, LEARNER)["stage2_job_gpus_held"] == [({}, 0)]
    on_cpu["spec"]["learner"]["resourceClaimTemplate"] = "one-gpu"
    assert figures(on_cpu, SERVERS, LEARNER)["stage2_job_gpus_held"] == [({}, 4)]


def test_missing_spec_section_counts_with_its_defaults() -> None:
    job = b.job()
    del job["spec"]["rollout"], job["spec"]["learner"]
    default = RolloutSpec().servers * RolloutSpec().gpus_per_server + LearnerSpec().gpus
    assert figures(job, SERVERS, LEARNER)["stage2_job_gpus_held"] == [({}, default)]


def test_time_to_first_step_is_exported_once_known() -> None:
    raw, made = b.job(), b.planned(b.job())
    assert "stage2_job_first_step_seconds" not in figures(b.with_status(raw, made))
    stepped = b.planned(b.with_status(raw, made), b.started(raw), after_s=90)
    assert figures(b.with_status(raw, stepped))["stage2_job_first_step_seconds"] == [({}, 90)]


def test_report_age_and_restarts_are_exported() -> None:
    job = seen(b.started(b.job()))
    job["status"]["servers"][1]["restarts"] = 5
    found = figures(job, report_age_s=12.5)
    assert found["stage2_job_report_age_seconds"] == [({}, 12.5)]
    assert found["stage2_job_server_restarts"] == [({}, 5)]
    assert found["stage2_job_restarts"] == [({}, 0)]
    assert "stage2_job_report_age_seconds" not in figures(job)


def test_training_metrics_come_from_job_status() -> None:
    found = figures(seen(b.started(b.job())))
    values = {name: found[f"stage2_job_{name}"] for name in ("step", "max_steps", "loss", "sync_seconds")}
    assert values == {"step": [({}, 4)], "max_steps": [({}, 10)], "loss": [({}, 0.5)], "sync_seconds": [({}, 0.2)]}
