"""SIGTERM in each phase of a learner of several processes: all stop soon, with the last whole step on disk.

Each waits for the others in most of what it does, so one that left alone would hang them.
"""

import json
import signal
import sys
import time

import pytest
import yaml

from stage2_trainer.model.checkpoints import newest_whole
from tests.integration.runs import adapter, learn
from tests.integration.test_local_rollouts import (
    COLOCATE,
    ROUNDING,
    assert_same_weights,
    configuration,
    losses,
    shapes,  # noqa: F401 - a fixture
    zero,
)
from tests.support import forked
from tests.support.fork_server import STRUCK
from tests.support.patience import Patience

GRACE_S, RUN_S = 60.0, 60.0  # RUN_S: a start and two steps
LAUNCH = """
import sys
from stage2_trainer.process.torchrun import run_processes
sys.exit(run_processes(sys.argv[1], sys.argv[2:], processes=2))
"""
TRAINING = {"max_steps": 3, "save_strategy": "no", "effective_batch_size": 4}  # two micro-steps in each process
LEFT = {
    "loading": None,
    "rollouts": "checkpoint-1",
    "optimizer": "checkpoint-2",
    "evaluation": "checkpoint-1",
    "save": "checkpoint-2",
}


def struck(folder, config, phase, *, imports=forked.LEARNER):
    """Run two learner processes that are asked to stop in this phase; return their output."""
    path, log = folder / "config.yaml", folder / "learner.log"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", LAUNCH, STRUCK, path, phase]
    with log.open("wb") as output:
        process = forked.start(command, imports=(*imports, STRUCK), stdout=output)
        try:
            patience = Patience(GRACE_S + RUN_S)
            while (code := process.poll()) is None and not patience.ended():
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGKILL)
    assert code == 75, log.read_text()[-5000:]
    return log.read_text()


def config_of(shapes, folder, phase, **top):  # noqa: F811
    more = {
        "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
        "save": {"save_strategy": "steps"},
        "last": {"save_strategy": "steps", "save_steps": TRAINING["max_steps"]},
    }
    return configuration(shapes, folder, training={**TRAINING, **more.get(phase, {})}, **top)


def assert_stopped(folder, output, left):
    """The last step of the log is on disk, and the output has the request to stop and no traceback."""
    assert "asked to stop (SIGTERM)" in output
    assert "Traceback" not in output
    found = newest_whole(folder)
    assert (found and found.name) == left
    if left:
        steps = [json.loads(line) for line in (folder / "stage2_log.jsonl").read_text().splitlines()]
        assert left == f"checkpoint-{max(one['step'] for one in steps if one['event'] == 'step')}"


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(("phase", "stage"), [*((phase, 2) for phase in LEFT), ("rollouts", None), ("rollouts", 3)])
def test_sigterm_in_each_phase_saves_last_whole_step_of_two_processes(shapes, tmp_path, phase, stage):  # noqa: F811
    sharded = {} if stage is None else {"deepspeed": zero(stage)}
    output = struck(tmp_path, config_of(shapes, tmp_path, phase, **sharded), phase)
    assert_stopped(tmp_path, output, LEFT[phase])


@pytest.mark.in_turns(2)
@pytest.mark.vllm
def test_tensor_parallel_engine_stops_on_sigterm_in_both_processes(shapes, tmp_path, no_other_engine):  # noqa: F811
    matching = {"rollout_backend": "vllm", "vllm": {**COLOCATE, "tensor_parallel_size": 2}}
    config = config_of(shapes, tmp_path, "engine", matching=matching)
    output = struck(tmp_path, config, "engine", imports=(*forked.VLLM, *forked.LEARNER))
    assert_stopped(tmp_path, output, "checkpoint-1")


@pytest.mark.in_turns(2)
def test_run_stopped_between_gradients_resumes_like_uninterrupted_process(shapes, tmp_path):  # noqa: F811
    whole, run = tmp_path / "whole", tmp_path / "run"
    run.mkdir()
    expected, _ = learn(config_of(shapes, whole, "last"))
    stopped = config_of(shapes, run, "last", deepspeed=zero(2))
    assert_stopped(run, struck(run, stopped, "gradients"), "checkpoint-1")
    steps, output = learn(stopped, processes=2)
    assert "resuming from" in output
    assert losses(steps) == pytest.approx(losses(expected), rel=ROUNDING)
    assert_same_weights(*(adapter(folder, TRAINING["max_steps"]) for folder in (whole, run)), ROUNDING)
