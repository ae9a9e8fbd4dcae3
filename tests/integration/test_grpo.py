"""GRPO in two learner processes beside one rollout server: what they do together, and that they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from tests.integration import runs

pytestmark = pytest.mark.timeout(900)

JOB = runs.ROOT / "examples" / "job-grpo-6v2-tiny.yaml"
END_S = 120.0
STEPS = 12
RISE = 0.08
"""Of a mean reward between 0 and 1; it rises by more than 0.15, whatever the seed."""


def run_job(folder: Path, **training: object) -> subprocess.Popen[bytes]:
    """Start the tiny twin on the CPU stub, with some keys of `training` changed."""
    script = runs.ROOT / "examples" / "make_summaries.py"
    subprocess.run([sys.executable, script, folder / "summaries", "--train", "64", "--held-out", "0"], check=True)
    job = yaml.safe_load(JOB.read_text())
    port = runs.free_ports(2)
    job["spec"]["rollout"]["port"] = port
    job["spec"]["learner"]["backoffLimit"] = 0
    job["spec"]["config"]["rlhf"] |= {"vllm_server_port": [port], "vllm_server_timeout": 20.0}
    job["spec"]["config"]["training"] |= training
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    examples = "/opt/stage2/examples"
    model = runs.ROOT / "examples" / "tiny-summaries"
    maps = [f"{examples}/summaries={folder / 'summaries'}", f"{examples}/tiny-summaries={model}"]
    options = ["--engine", "stub", "--work-dir", folder, *(part for text in maps for part in ("--map", text))]
    command = [runs.STAGE2, "run", folder / "job.yaml", *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def finished(folder: Path, **training: object) -> list[dict]:
    process = run_job(folder, **training)
    assert process.wait(END_S * 6) == 0, (folder / "logs" / "learner.log").read_text()[-4000:]
    return runs.records(folder)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the steps of the job write; its seed is fixed in its file."""
    return finished(tmp_path_factory.mktemp("grpo"), max_steps=STEPS)


def test_rewards_alone_teach_the_model(records: list[dict]) -> None:
    rewards = [record["reward"] for record in records if record["event"] == "step"]
    quarter = STEPS // 4
    assert fmean(rewards[-quarter:]) > fmean(rewards[:quarter]) + RISE


def test_rewards_are_told_one_by_one_and_weights_travel_each_step(records: list[dict]) -> None:
    steps = [record for record in records if record["event"] == "step"]
    assert all("rewards/summary.content_f1/mean" in step and "rewards/summary.content_f1/std" in step for step in steps)
    assert [step["sync/version"] for step in steps] == list(range(STEPS))


def test_the_run_says_what_it_was_made_of(records: list[dict]) -> None:
    (record,) = [record for record in records if record["event"] == "reproducibility"]
    assert record["sync"] == {"requested": "full", "effective": "full"}
    assert record["dataset"]["records"] == 64


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_learner_process_is_killed_the_other_ends_too(tmp_path: Path, victim: int) -> None:
    process = run_job(tmp_path, max_steps=1000)
    try:
        log = tmp_path / "logs" / "learner.log"
        wait_for(lambda: log.exists() and '"event": "step"' in log.read_text())
        ranks = learner_ranks(tmp_path)
        os.kill(ranks[victim], signal.SIGKILL)
        assert process.wait(END_S) != 0
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks.values()))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)


def test_when_the_server_cannot_come_back_all_learner_processes_end_with_the_retryable_code(tmp_path: Path) -> None:
    process = run_job(tmp_path, max_steps=1000)
    try:
        log = tmp_path / "logs" / "learner.log"
        wait_for(lambda: log.exists() and '"event": "step"' in log.read_text())
        (tmp_path / "etc" / "token" / "token").write_text("another")  # a server that starts again refuses the learner
        os.kill(pids(tmp_path, "stub")[0], signal.SIGKILL)
        assert process.wait(END_S) == 75
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(END_S)


def wait_for(condition) -> None:
    deadline = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def pids(folder: Path, word: str) -> list[int]:
    """Processes of a run: those that were told its folder, with a word in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in environment and word.encode() in command:
            found.append(int(entry.name))
    return found


def learner_ranks(folder: Path) -> dict[int, int]:
    """The learner's processes by rank."""
    found = {}
    for pid in pids(folder, "learn"):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        values = dict(item.split(b"=", 1) for item in environment if b"=" in item)
        if b"RANK" in values:
            found[int(values[b"RANK"])] = pid
    return found


def test_rollouts_are_written_by_each_process(records: list[dict], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = next(Path(tmp_path_factory.getbasetemp()).glob("grpo0"))
    files = sorted(folder.rglob("*rollouts.jsonl"))
    assert [file.name for file in files] == ["rank-1-rollouts.jsonl", "rollouts.jsonl"]
    for file in files:
        line = json.loads(file.read_text().splitlines()[-1])
        assert line["version"] == STEPS - 1
        assert set(line["rewards"]) == {"summary.format", "summary.category_f1", "summary.content_f1"}
