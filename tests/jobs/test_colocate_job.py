"""A job whose learner makes its own rollouts, end to end on a cluster: the colocated example, cut to a few steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import Ran, example_run, kubectl, whole_record

JOB = "job-colocate-tiny"
STEPS = 3
OWNED = f"stage2.dev/job={JOB}"


@pytest.fixture(scope="module")
def ran(installed: Path) -> Iterator[Ran]:
    """The example, cut to a few steps, run to its end."""

    def smaller(config: dict[str, Any]) -> None:
        config["training"] |= {"max_steps": STEPS, "eval_steps": STEPS, "save_steps": STEPS}
        config["custom"] |= {"train_sample_limit": 64, "val_sample_limit": 4}

    with example_run(installed, JOB, smaller) as ran:
        yield ran


def test_the_job_succeeds_after_all_its_steps(ran: Ran) -> None:
    status = ran.job["status"]
    assert status["phase"] == "Succeeded", ran.log[-4000:]
    assert status["step"] == status["maxSteps"] == STEPS


def test_the_learner_has_the_gpus_and_no_server_stands_beside_it(ran: Ran, installed: Path) -> None:
    deployments, services, jobs = (
        json.loads(kubectl(installed, "get", kind, f"--selector={OWNED}", "--output=json"))["items"]
        for kind in ("deployments", "services", "jobs")
    )
    assert deployments == []
    assert [service for service in services if "rollout" in service["metadata"]["name"]] == []
    (learner,) = jobs
    (container,) = learner["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_record_says_that_the_rollouts_are_the_learners_own(ran: Ran) -> None:
    record = whole_record(ran.records("reproducibility"), merge=None)
    assert record["servers"] == []
    assert record["dataset"]["records"] == 64


def test_every_step_logs_rollouts_of_the_weights_it_starts_from(ran: Ran) -> None:
    steps = ran.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    for step in steps:
        assert step["loss"] > 0
        assert 0 < step["packing/post_rollout_fill"] <= 1
        assert step["rollout/gt_objects"] > 0
        assert step["rollout/gen_new_tokens_total"] > 0
        assert step["time/rollout_generate_s"] > 0
        assert step["memory/peak_bytes"] > 0


def test_the_run_is_evaluated_before_and_after(ran: Ran) -> None:
    assert [evaluation["step"] for evaluation in ran.records("evaluation")] == [0, STEPS]
