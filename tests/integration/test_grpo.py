"""GRPO in two learner processes beside one rollout server: what they do together, and that they end together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from stage2_trainer.data.records import load_records
from stage2_trainer.scores.answer_file import read_rollouts
from stage2_trainer.scores.image_counts import image_counts
from stage2_trainer.scores.rollout_file import Rollouts, places_in
from stage2_trainer.scores.scored_image import scored_images
from stage2_trainer.serve.server_command import STUB_MODULE
from stage2_trainer.sync.fleet.merge_location import NO_ADAPTER
from stage2_trainer.sync.fleet.report import PHASES
from tests.integration import runs
from tests.integration.conftest import patience
from tests.integration.test_local_rollouts import zero
from tests.support import forked
from tests.support.fork_server import REGISTRY_VARIABLE
from tests.support.patience import Patience
from tests.support.ports import free_ports

pytestmark = pytest.mark.in_turns(2, first=1)

EXAMPLES = runs.ROOT / "examples"
DATA = {"job-grpo-6v2-tiny": ("summaries", "tiny-summaries"), "job-grpo-objects-tiny": ("shapes", "tiny-qwen3-vl")}
HELD_OUT = 8
END_S = 400.0
STUCK_S = 2.0
LAUNCHER = "launcher"  # of the learner's processes: torchrun
STEPS = 12
RISE = 0.08
"""Of a mean reward between 0 and 1; it rises by more than 0.15, whatever the seed."""


def run_job(
    folder: Path,
    name: str = "job-grpo-6v2-tiny",
    *,
    backoff: int = 0,
    sharded: int | None = None,
    server_timeout_s: float = END_S,
    **training: object,
) -> forked.Forked:
    """Start a tiny twin on the CPU stub, with some keys of `training` changed."""
    data, model = DATA[name]
    make = [sys.executable, EXAMPLES / f"make_{data}.py", folder / data]
    subprocess.run([*make, "--train", "64", "--held-out", str(HELD_OUT)], check=True)
    job = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    port = free_ports(2)
    job["spec"]["rollout"]["port"] = port
    job["spec"]["learner"]["backoffLimit"] = backoff
    job["spec"]["config"]["rlhf"] |= {"vllm_server_port": [port], "vllm_server_timeout": server_timeout_s}
    job["spec"]["config"]["training"] |= training
    if sharded is not None:
        job["spec"]["config"]["deepspeed"] = zero(sharded)
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    examples = "/opt/stage2/examples"
    maps = [f"{examples}/{data}={folder / data}", f"{examples}/{model}={EXAMPLES / model}"]
    options = ["--engine", "stub", "--work-dir", folder, *(part for text in maps for part in ("--map", text))]
    command = [forked.STAGE2, "run", folder / "job.yaml", *options]
    (folder / "processes").mkdir()
    more = () if sharded is None else ("deepspeed",)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", REGISTRY_VARIABLE: str(folder / "processes")}
    return forked.start(command, imports=(*forked.GRPO, *forked.STUB, *more, "stage2_cli.run"), env=environment)


@contextlib.contextmanager
def running_job(folder: Path, **options: Any) -> Iterator[forked.Forked]:
    """Run the tiny twin, and end it with the block."""
    process = run_job(folder, **options)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def finished(folder: Path, *name: str, **training: object) -> list[dict]:
    process = run_job(folder, *name, **training)
    assert process.wait() == 0, (folder / "logs" / "learner.log").read_text()[-4000:]
    return runs.records(folder)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the steps of the job write; its seed is fixed in its file."""
    return finished(tmp_path_factory.mktemp("grpo"), max_steps=STEPS)


def test_rewards_increase_during_grpo_run(records: list[dict]) -> None:
    rewards = [record["reward"] for record in records if record["event"] == "step"]
    quarter = STEPS // 4
    assert fmean(rewards[-quarter:]) > fmean(rewards[:quarter]) + RISE


def test_each_reward_is_logged_and_weights_are_pushed_each_step(records: list[dict]) -> None:
    steps = [record for record in records if record["event"] == "step"]
    assert all("rewards/summary.content_f1/mean" in step and "rewards/summary.content_f1/std" in step for step in steps)
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert {step["sync/transport"] for step in steps} == {"tcp"}
    assert all(step["sync/gigabytes_per_second"] > 0 for step in steps)
    assert all(step["sync/wire_bytes"] >= step["sync/bytes"] for step in steps)
    assert all(sum(step[f"sync/{phase}_s"] for phase in PHASES) > 0 for step in steps)


def test_object_rewards_match_evaluation_of_held_out_answers(tmp_path: Path) -> None:
    records = finished(tmp_path, "job-grpo-objects-tiny", max_steps=2, eval_steps=2)
    steps = [record for record in records if record["event"] == "step"]
    names = ("objects.f1_class", "objects.iou", "objects.format")
    assert all(0 < step[f"rewards/{name}/mean"] <= 1 for step in steps for name in names[1:])
    (rollouts,) = tmp_path.rglob("rollouts.jsonl")
    held_out = tmp_path / "shapes" / "held-out.jsonl"
    read = load_records(held_out)
    found = read_rollouts(Rollouts(rollouts), read, places_in(held_out))
    assert (len(found.answers), found.missing) == (HELD_OUT, [])
    figures = [image_counts(image) for image in scored_images(read, found.answers)]
    (evaluation,) = [record for record in records if record["event"] == "evaluation" and record["step"] == 2]
    f1 = fmean(2 * one.class_right / (one.class_judged + one.truth) for one in figures)
    assert evaluation["eval_rewards/objects.f1_class/mean"] == pytest.approx(f1, abs=1e-3)


def test_run_logs_reproducibility_record(records: list[dict]) -> None:
    (record,) = [record for record in records if record["event"] == "reproducibility"]
    how = {"merge": "learner", "merge_reason": NO_ADAPTER, "transport": "tcp"}
    assert record["sync"] == {"requested": "full", "effective": "full", **how}
    assert record["dataset"]["records"] == 64


def test_killed_learner_process_ends_and_restarts_all_processes(tmp_path: Path) -> None:
    victims = ["rank 0", "rank 1", LAUNCHER]
    with running_job(tmp_path, backoff=len(victims) - 1, max_steps=1000) as process:
        for victim in victims:
            learner = learner_that_trains(tmp_path)
            os.kill(learner[victim], signal.SIGKILL)
            wait_for(partial(ended, learner.values()))
        assert process.wait() != 0


@pytest.mark.parametrize("sharded", [None, 2], ids=["plain", "ZeRO-2"])
def test_sigterm_while_server_hangs_saves_last_step_in_all_processes(tmp_path: Path, sharded: int | None) -> None:
    with running_job(tmp_path, sharded=sharded, max_steps=1000):
        learner = learner_that_trains(tmp_path)
        (stub,) = processes(tmp_path, STUB_MODULE)
        os.kill(stub, signal.SIGSTOP)
        time.sleep(STUCK_S)  # by the clock: by then they need the server; if not yet, they stop too
        os.kill(learner[LAUNCHER], signal.SIGTERM)
        wait_for(partial(ended, learner.values()))
        log = tmp_path / "logs" / "learner.log"
        assert "asked to stop (SIGTERM)" in log.read_text()
        assert "no answer in time" not in log.read_text()
        saved = {step for one in tmp_path.rglob("checkpoint-*") if (step := one.name.partition("-")[2]).isdecimal()}
        assert max(map(int, saved)) == steps(log)


def test_lost_server_ends_all_learner_processes_with_retryable_code(tmp_path: Path) -> None:
    with running_job(tmp_path, server_timeout_s=patience(20), max_steps=1000) as process:
        learner_that_trains(tmp_path)
        (tmp_path / "etc" / "token" / "token").write_text("another")  # a server that starts again refuses the learner
        (stub,) = processes(tmp_path, STUB_MODULE)
        os.kill(stub, signal.SIGKILL)
        assert process.wait() == 75


def wait_for(condition: Callable[[], object]) -> None:
    patience = Patience(END_S)
    while not condition():
        assert not patience.ended()
        time.sleep(0.2)


def learner_that_trains(folder: Path) -> dict[str, int]:
    """The learner's processes by what they are, once they have trained for a step."""
    log = folder / "logs" / "learner.log"
    before = steps(log)
    wait_for(lambda: steps(log) > before)
    found = processes(folder, "learn")
    return {f"rank {environment['RANK']}" if "RANK" in environment else LAUNCHER: pid
            for pid, environment in found.items()}  # fmt: skip


def steps(log: Path) -> int:
    return log.read_text().count('"event": "step"') if log.exists() else 0


def ended(pids: Iterable[int]) -> bool:
    """Whether all processes have ended; one that only waits for its parent to take notice has."""
    return not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids)


def processes(folder: Path, word: str) -> dict[int, dict[str, str]]:
    """Processes of a run that run a word, with their environment."""
    found = {}
    for file in (folder / "processes").glob("[0-9]*"):
        process = json.loads(file.read_text())
        if word in process["command"] and not ended([int(file.name)]):
            found[int(file.name)] = process["environment"]
    return found


def test_each_process_writes_its_rollouts(records: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = next(Path(tmp_path_factory.getbasetemp()).glob("grpo0"))
    files = sorted(folder.rglob("*rollouts.jsonl"))
    assert [file.name for file in files] == ["rank-1-rollouts.jsonl", "rollouts.jsonl"]
    for file in files:
        line = json.loads(file.read_text().splitlines()[-1])
        assert line["version"] == STEPS - 1
        assert set(line["rewards"]) == {"summary.format", "summary.category_f1", "summary.content_f1"}
