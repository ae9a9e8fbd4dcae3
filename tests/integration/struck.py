"""One of several learner processes: when it comes to a phase of a step, the launcher of all is asked to stop.

    python -m tests.integration.struck CONFIG PHASE

The second process asks, for torchrun passes it on to all. In `rollouts` and `evaluation` the answers of that process
would never end, and in `engine` those of all; other phases last as long as they do.
"""

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import yaml
from torch import nn
from transformers import TrainerCallback

from stage2_api.parsing import parse_run_config
from stage2_cli.processes import end_with_parent
from stage2_trainer import main
from stage2_trainer.learner.trainer import RolloutMatchingTrainer
from stage2_trainer.process.base_trainer import WholeCheckpoints
from stage2_trainer.rollouts.colocate import ColocateEngine
from stage2_trainer.rollouts.hf import HfBackend

STEP = 1  # steps that are whole before the phase comes
ENDLESS = 10**6
NO_TOKEN = -1


STRUCK: list[bool] = []


def strike() -> None:
    """Ask the launcher to stop, once."""
    if os.environ["RANK"] == "1" and not STRUCK:
        STRUCK.append(True)
        os.kill(os.getppid(), signal.SIGTERM)


def before(owner: type, name: str, do) -> None:
    """Do something before each call of a method."""
    real = getattr(owner, name)

    def method(self, *arguments, **options):
        do(self, *arguments, **options)
        return real(self, *arguments, **options)

    setattr(owner, name, method)


class AtStep(TrainerCallback):
    """A callback that strikes while the optimizer steps."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        if state.global_step == STEP:
            strike()


def endless(backend: HfBackend) -> None:
    """Let answers never end."""
    backend._decoding, backend._end = replace(backend._decoding, max_new_tokens=ENDLESS), NO_TOKEN
    strike()


def in_rollouts(backend: HfBackend, requests, *, seed_plan, version=None) -> None:
    if version == STEP and os.environ["RANK"] == "1":
        endless(backend)


def in_evaluation(backend: HfBackend, requests, *, seed_plan, version=None) -> None:
    if version == STEP and len(requests) > 1 and os.environ["RANK"] == "1":  # a step asks for one
        endless(backend)


def in_engine(engine: ColocateEngine, requests, *, seed_plan, version=None) -> None:
    """Ask the engine the same again and again; all of its processes must."""
    if version == STEP:
        engine._calls = itertools.repeat
        strike()


def in_gradients(own: RolloutMatchingTrainer, model: nn.Module, *arguments, **options) -> None:
    if own.state.global_step == STEP:
        strike()


def in_save(own: WholeCheckpoints, model: nn.Module, trial, staged: Path) -> None:
    if own.state.global_step == STEP + 1:
        strike()


PHASES = {
    "rollouts": (HfBackend, "generate", in_rollouts),
    "evaluation": (HfBackend, "generate", in_evaluation),
    "engine": (ColocateEngine, "generate", in_engine),
    "gradients": (RolloutMatchingTrainer, "compute_loss", in_gradients),
    "optimizer": (RolloutMatchingTrainer, "train", lambda own, *a, **k: own.add_callback(AtStep())),
    "save": (WholeCheckpoints, "_write_aside", in_save),
}


def install(phase: str) -> None:
    if phase == "loading":
        strike()
    else:
        before(*PHASES[phase])


if __name__ == "__main__":
    end_with_parent()
    config, phase = sys.argv[1:]
    install(phase)
    sys.exit(main.learn(parse_run_config(yaml.safe_load(Path(config).read_text()))))
