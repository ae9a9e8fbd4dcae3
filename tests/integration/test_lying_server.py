"""A server that lies ends the run with exit code 1, and costs no checkpoint that was good: stage 2, and GRPO."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stage2_trainer.model.checkpoints import list_checkpoints, newest_whole
from tests.integration import runs
from tests.integration.conftest import Served, stop, wait_until_healthy
from tests.integration.test_fault_table import learner_config
from tests.support import forked
from tests.support.ports import free_port

pytestmark = pytest.mark.in_turns(3, apart=True)
GOOD = 3  # steps that are trained beside an honest server
EVERY = 3  # syncs from one proof to the next
FIRST_LIE = GOOD + 2  # as an update of the server: the sync of the step at which the run goes on is the last honest one


@pytest.fixture
def lying(tmp_path, token_file):
    """A function that starts a stub that lies, and returns it when it is healthy."""
    started = []

    def start(lie, first, model):
        port, log = free_port(), tmp_path / "server.log"
        arguments = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
        code = f"from tests.integration import lying_stub; lying_stub.main({lie!r}, {first}, {arguments!r})"
        environment = {**os.environ, "STAGE2_TOKEN_FILE": str(token_file)}
        with log.open("wb") as output:
            command = [sys.executable, "-c", code]
            process = forked.start(command, imports=forked.STUB, env=environment, stdout=output)
        started.append(process)
        served = Served("stub", f"http://127.0.0.1:{port}", free_port(), "float32", log, process)
        wait_until_healthy(served)
        return served

    yield start
    for process in started:
        stop(process)


@pytest.fixture
def learn(tmp_path, token_file):
    """A function that trains a configuration up to a step, keeping one checkpoint; its exit code and words."""

    def run(config, *, imports, max_steps, save_steps=1):
        config["training"] |= {
            "output_dir": str(tmp_path / "out"), "max_steps": max_steps, "save_strategy": "steps",
            "save_steps": save_steps,
            "save_total_limit": 1, "lr_scheduler_type": "constant", "logging_steps": 1,
        }  # fmt: skip
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "STAGE2_TOKEN_FILE": str(token_file), "OMP_NUM_THREADS": "1"}
        done = forked.run([forked.STAGE2, "learn", path], imports=imports, env=environment)
        return done.returncode, done.stderr

    return run


@pytest.fixture
def stage2(tmp_path, model_path):
    """A function that returns a configuration of stage 2 for a server."""

    def config(served):
        found = yaml.safe_load(learner_config(tmp_path, [served], model_path).read_text())
        found["training"]["learning_rate"] = 5e-3
        found["custom"]["extra"]["rollout_matching"]["vllm"]["sync"] = {"verify_every": EVERY}
        return found

    return config


@pytest.fixture
def grpo(tmp_path):
    """The same of a GRPO run, which trains in full."""
    script = runs.ROOT / "examples" / "make_summaries.py"
    counts = ["--train", "8", "--held-out", "0"]
    subprocess.run([sys.executable, script, tmp_path / "summaries", *counts], check=True, capture_output=True)

    def config(served):
        job = yaml.safe_load((runs.ROOT / "examples" / "job-grpo-6v2-tiny.yaml").read_text())
        found = job["spec"]["config"]
        found["model"]["model"] = str(GRPO_MODEL)
        found["training"] |= {"per_device_train_batch_size": 8, "effective_batch_size": 8}
        ports = {"vllm_server_port": [int(served.base_url.rpartition(":")[2])]}
        ports["vllm_server_group_port"] = [served.group_port]
        found["rlhf"] |= {**ports, "generation_batch_size": 8}
        found["custom"]["train_jsonl"] = str(tmp_path / "summaries" / "train.jsonl")
        found["custom"]["extra"]["rollout_matching"] = {"vllm": {"sync": {"verify_every": EVERY}}}
        return found

    return config


GRPO_MODEL = runs.ROOT / "examples" / "tiny-summaries"


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_failed_proof_keeps_newest_proved_checkpoint(lying, learn, grpo, tmp_path):
    """Between two proofs more checkpoints are saved than are kept, all from rollouts of weights that are too old."""
    config = grpo(lying("keeps", FIRST_LIE, GRPO_MODEL))
    code, output = learn(config, imports=forked.GRPO, max_steps=GOOD)
    assert code == 0, output[-4000:]
    good = tmp_path / "out" / f"checkpoint-{GOOD}"
    before = contents(good)
    code, output = learn(config, imports=forked.GRPO, max_steps=GOOD + 3 * EVERY)
    assert code == 1, output[-4000:]
    assert "answers with other weights than those that train" in output
    assert newest_whole(tmp_path / "out") == good
    assert contents(good) == before
    aside = tmp_path / "out" / f"unproved-checkpoint-{GOOD + EVERY}"
    assert aside.is_dir()
    assert str(aside) in output
    assert list_checkpoints(tmp_path / "out") == [good]


def test_failed_first_proof_of_restart_sets_aside_unproved_checkpoint(lying, learn, stage2, model_path, tmp_path):
    """The start that was lied to was stopped before its next proof was due."""
    config = stage2(lying("keeps", FIRST_LIE, model_path))
    for last in (GOOD, GOOD + EVERY - 1):
        code, output = learn(config, imports=forked.LEARNER, max_steps=last)
        assert code == 0, output[-4000:]
    good = tmp_path / "out" / f"checkpoint-{GOOD}"
    assert good in list_checkpoints(tmp_path / "out")
    before = contents(good)
    code, output = learn(config, imports=forked.LEARNER, max_steps=GOOD + 3 * EVERY)
    assert code == 1, output[-4000:]
    assert "answers with other weights than those that train" in output
    assert newest_whole(tmp_path / "out") == good
    assert contents(good) == before
    aside = tmp_path / "out" / f"unproved-checkpoint-{GOOD + EVERY - 1}"
    assert aside.is_dir()
    assert str(aside) in output
    assert list_checkpoints(tmp_path / "out") == [good]


def test_digest_mismatch_stops_run_before_training_and_saves_last_step(lying, learn, stage2, model_path, tmp_path):
    config = stage2(lying("changes", GOOD, model_path))
    config["custom"]["extra"]["rollout_matching"]["vllm"]["sync"] = {"verify_every": 0}
    code, output = learn(config, imports=forked.LEARNER, max_steps=GOOD + EVERY, save_steps=GOOD + EVERY)
    assert code == 1, output[-4000:]
    assert "the digests of what was sent and of what was loaded differ" in output
    assert list_checkpoints(tmp_path / "out") == [tmp_path / "out" / f"checkpoint-{GOOD - 1}"]
    assert not list((tmp_path / "out").glob("unproved-*"))
