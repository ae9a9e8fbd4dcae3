"""SIGTERM in each phase of a run: it stops where it is, with the last whole step on disk, and exit code 75.

Servers are given minutes for an answer here, so a learner that waited for one would still be there when the test looks.
"""

import contextlib
import json
import signal
import sys
import time

import pytest
import yaml

from stage2_trainer.model.checkpoints import newest_whole
from tests.integration.conftest import patience
from tests.integration.runs import learning
from tests.integration.test_fault_table import learner_config, strike
from tests.support.ports import free_port

pytestmark = pytest.mark.in_turns(2, apart=True)
SERVER_TIMEOUT_S = 250.0
GRACE_S = 30.0  # of a pod between SIGTERM and SIGKILL, by default
STUCK_S = 2.0
STOPS_SERVER = """
import os, signal, sys
from stage2_cli.main import main
from stage2_trainer.learner.evaluate import Evaluation

pid, evaluate = int(sys.argv.pop(1)), Evaluation.__call__

def evaluate_after_a_step(*arguments, global_step):
    if global_step > 0:
        os.killpg(pid, signal.SIGSTOP)
        print("the server stands still", flush=True)
    return evaluate(*arguments, global_step=global_step)

Evaluation.__call__ = evaluate_after_a_step
main()
"""


@pytest.fixture
def learn(tmp_path, token_file, model_path):
    """A function that starts a learner on a server, with keys of `training` and `rollout_matching` changed."""

    def start(served, *, training=(), matching=(), **how):
        path = learner_config(tmp_path, [served], model_path)
        config = yaml.safe_load(path.read_text())
        config["training"] |= dict(training)
        section = config["custom"]["extra"]["rollout_matching"]
        section["vllm"]["server"]["timeout_s"] = SERVER_TIMEOUT_S
        section |= dict(matching)
        config["custom"]["val_jsonl"] = str(tmp_path / "shapes" / "held-out.jsonl")
        path.write_text(yaml.safe_dump(config))
        log = tmp_path / "learner.log"
        return stack.enter_context(learning(path, log, STAGE2_TOKEN_FILE=token_file, **how)), log

    with contextlib.ExitStack() as stack:
        yield start


def wait_for_log(process, log, words):
    """Wait until the log holds these words."""
    while words not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


def stops(process, log):
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patience(GRACE_S)) == 75, log.read_text()
    assert "asked to stop (SIGTERM)" in log.read_text()
    assert "Traceback" not in log.read_text()


def steps_of(folder):
    lines = (folder / "out" / "stage2_log.jsonl").read_text().splitlines()
    return [found["step"] for line in lines if (found := json.loads(line))["event"] == "step"]


class Nobody:
    """A server that never comes."""

    def __init__(self):
        self.base_url, self.group_port = f"http://127.0.0.1:{free_port()}", free_port()


def test_sigterm_while_waiting_for_servers_stops_without_checkpoint(learn, tmp_path):
    process, log = learn(Nobody())
    wait_for_log(process, log, "waiting for servers")
    stops(process, log)
    assert newest_whole(tmp_path / "out") is None


@pytest.mark.parametrize("pipelined", [False, True])
def test_sigterm_while_server_hangs_saves_last_step(learn, start_server, tmp_path, pipelined):
    served = start_server("stub")
    process, log = learn(served, matching={"pipeline": {"enabled": pipelined}})
    wait_for_log(process, log, '"event": "step"')
    strike(served, signal.SIGSTOP)
    time.sleep(STUCK_S)  # by the clock: by then it needs the server; if not yet, it stops too
    stops(process, log)
    assert newest_whole(tmp_path / "out").name == f"checkpoint-{max(steps_of(tmp_path))}"


def test_sigterm_during_evaluation_saves_last_step(learn, start_server, tmp_path):
    served = start_server("stub")
    command = [sys.executable, "-c", STOPS_SERVER, str(served.process.pid), "learn"]
    process, log = learn(served, training={"eval_strategy": "steps", "eval_steps": 1}, command=command)
    wait_for_log(process, log, "the server stands still")
    stops(process, log)
    (step,) = steps_of(tmp_path)
    events = [json.loads(line) for line in (tmp_path / "out" / "stage2_log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in events if one["event"] == "evaluation"] == [step - 1]
    assert events[-1] == {"event": "end", "step": step, "outcome": "stopped", "message": "asked to stop (SIGTERM)"}
    assert newest_whole(tmp_path / "out").name == f"checkpoint-{step}"
