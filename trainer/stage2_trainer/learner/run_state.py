"""The state of a run on disk, in the files that transformers names: weights, optimizer, schedule, random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_pt_utils import safe_globals

from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.process.checkpoints import STATE

OPTIMIZER, SCHEDULE, RANDOM = "optimizer.pt", "scheduler.pt", "rng_state.pth"
WEIGHTS = "model.safetensors"


def write_run(folder: Path, engine: AccelerateEngine) -> None:
    """Write what a run resumes from, but for its `TrainerState`."""
    folder.mkdir(parents=True, exist_ok=True)
    engine.policy.save_pretrained(folder)
    torch.save(engine.optimizer.state_dict(), folder / OPTIMIZER)
    torch.save(engine.schedule.state_dict(), folder / SCHEDULE)
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(states, folder / RANDOM)


def read_run(folder: Path, engine: AccelerateEngine) -> TrainerState:
    """Resume from a checkpoint, and return the state of its run."""
    load_weights(engine.policy, folder)
    engine.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))
    engine.schedule.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))
    with safe_globals():
        states = torch.load(folder / RANDOM, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    state: TrainerState = TrainerState.load_from_json(str(folder / STATE))
    return state


def load_weights(policy: Any, folder: Path) -> None:
    """Load the weights of a checkpoint, or its adapters, into a policy."""
    if isinstance(policy, PeftModel):
        policy.load_adapter(str(folder), policy.active_adapters[0], is_trainable=True)
        return
    policy.load_state_dict(load_file(folder / WEIGHTS, device="cpu"), strict=False)
    policy.tie_weights()
