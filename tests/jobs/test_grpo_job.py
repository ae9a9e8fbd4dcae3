"""GRPO end to end on a cluster: two learner processes, and one rollout server with two copies of the model.

It trains what the shipped 6v2 trains, DoRA with the image encoder: each copy of the server merges the adapter itself.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.clusters import ROOT, Ran, example_run, kubectl, whole_record

pytestmark = pytest.mark.in_turns(2, first=1)
JOB = "job-grpo-6v2-tiny"
SHIPPED = ROOT / "examples" / "job-grpo-6v2.yaml"
STEPS = 3
COPIES = 2


@pytest.fixture(scope="module")
def ran(installed: Path) -> Iterator[Ran]:
    """The example, cut to a few steps, with a data-parallel server, run to its end."""

    def smaller(config: dict[str, Any]) -> None:
        config["training"] |= {"max_steps": STEPS, "save_steps": STEPS}
        config["tuner"] = yaml.safe_load(SHIPPED.read_text())["spec"]["config"]["tuner"]
        config["custom"]["extra"]["rollout_matching"] = {"vllm": {"sync": {"verify_every": 1}}}
        config["custom"]["extra"]["rollout_server"]["vllm_data_parallel_size"] = COPIES

    with example_run(installed, JOB, smaller) as ran:
        yield ran


def test_job_succeeds_after_all_steps(ran: Ran) -> None:
    status = ran.job["status"]
    assert status["phase"] == "Succeeded", ran.log[-4000:]
    assert status["step"] == status["maxSteps"] == STEPS


def test_reproducibility_record_has_server_and_dataset(ran: Ran) -> None:
    record = whole_record(ran.records("reproducibility"), merge="server")
    (server,) = record["servers"]
    assert server.startswith("https://")
    assert record["dataset"]["records"] == 256


def test_every_step_scores_answers_of_weights_it_starts_from(ran: Ran) -> None:
    steps = ran.records("step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert all(step["reward"] > 0 and step["rewards/summary.format/mean"] > 0 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)


def test_learner_runs_two_processes(ran: Ran, installed: Path) -> None:
    learner = json.loads(kubectl(installed, "get", "job", f"{JOB}-learner", "--output=json"))
    (container,) = learner["spec"]["template"]["spec"]["containers"]
    assert "--processes=2" in container["command"]


def test_server_holds_two_model_copies_and_both_receive_weights(ran: Ran) -> None:
    """Digests of what each copy merged are compared with the learner's; prompts of proofs go to one copy in turn."""
    assert f"transfer group with {COPIES} workers" in ran.log
    assert ran.log.count("has the learner's log-probabilities") == STEPS


def test_status_reports_tokens_per_second(ran: Ran) -> None:
    assert ran.job["status"]["tokensPerSecond"] > 0
