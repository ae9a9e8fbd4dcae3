"""The state of a run on disk, in the files that transformers names: weights, optimizer, schedule.

DeepSpeed writes and reads a part of it by itself: each process its shard, and the names of weights with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper  # accelerate.utils has it where DeepSpeed is
from peft import PeftModel
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer_utils import load_sharded_checkpoint

from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.model.checkpoints import STATE
from stage2_trainer.model.deepspeed_compat import undivided
from stage2_trainer.process.ranks import rank, world_size

logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULE, SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
WEIGHTS = "model.safetensors"


def write_run(folder: Path, engine: AccelerateEngine, processor: Any = None) -> None:
    """Write what a run resumes from, but for its `TrainerState`. All processes must call it.

    processor: written too, so that the folder is a model that others load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, engine, processor)
    if not engine.args.save_only_model:
        _write_optimizer(folder, engine)


def read_run(folder: Path, engine: AccelerateEngine) -> TrainerState:
    """Resume from a checkpoint, and return the state of its run. All processes must call it."""
    if engine.steps_in_backward:
        adapted = isinstance(engine.policy, PeftModel)  # whose frozen weights are in no checkpoint
        with undivided(engine.wrapped, folder):
            deepspeed_load_checkpoint(engine.wrapped, str(folder), load_module_strict=not adapted)
    else:
        load_weights(engine.policy, folder)
    _read_optimizer(folder, engine)
    state: TrainerState = TrainerState.load_from_json(str(folder / STATE))
    return state


def load_weights(policy: Any, folder: Path) -> None:
    """Load the weights of a checkpoint, or its adapters, into a policy."""
    if isinstance(policy, PeftModel):
        policy.load_adapter(str(folder), policy.active_adapters[0], is_trainable=True)
        return
    if (folder / WEIGHTS).exists():
        loaded: Any = policy.load_state_dict(load_file(folder / WEIGHTS, device="cpu"), strict=False)
    else:
        loaded = load_sharded_checkpoint(policy, folder, strict=False)
    policy.tie_weights()
    missing = sorted(set(loaded.missing_keys) - set(policy.all_tied_weights_keys))
    if missing or loaded.unexpected_keys:
        raise ValueError(f"{folder}: missing are {missing}, and unknown are {sorted(loaded.unexpected_keys)}")


def _write_weights(folder: Path, engine: AccelerateEngine, processor: Any) -> None:
    try:
        weights = _weights(engine)
    except ValueError:  # of accelerate: ZeRO-3 is to keep them apart
        logger.warning("%s: DeepSpeed saved the weights in shards; zero_to_fp32.py merges them", folder)
        weights = {}
        if engine.args.save_only_model:
            _write_optimizer(folder, engine)  # DeepSpeed writes both together
    if rank() == 0:
        engine.policy.save_pretrained(folder, state_dict=weights)
        if weights == {}:
            (folder / WEIGHTS).unlink(missing_ok=True)  # empty
        if processor is not None:
            processor.save_pretrained(folder)


def _weights(engine: AccelerateEngine) -> Mapping[str, torch.Tensor] | None:
    """Return the weights to save, for DeepSpeed may have to gather them; None for those that the policy has."""
    if not engine.steps_in_backward:
        return None
    if isinstance(engine.policy, PeftModel) and engine.wrapped.zero_optimization_partition_weights():
        gathered: Any = engine.wrapped._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    else:
        gathered = engine.accelerator.get_state_dict(engine.wrapped)
    weights: Mapping[str, torch.Tensor] | None = gathered
    return weights


def _write_optimizer(folder: Path, engine: AccelerateEngine) -> None:
    """Write optimizer, schedule and scaler; DeepSpeed writes its optimizer, and a schedule of its own."""
    if engine.steps_in_backward:
        adapted = isinstance(engine.policy, PeftModel)
        engine.wrapped.save_checkpoint(str(folder), exclude_frozen_parameters=adapted)
    if rank() != 0:
        return
    if not engine.steps_in_backward:
        torch.save(engine.optimizer.state_dict(), folder / OPTIMIZER)
    if not isinstance(engine.schedule, DeepSpeedSchedulerWrapper):
        torch.save(engine.schedule.state_dict(), folder / SCHEDULE)
    if engine.accelerator.scaler is not None:
        torch.save(engine.accelerator.scaler.state_dict(), folder / SCALER)


def _read_optimizer(folder: Path, engine: AccelerateEngine) -> None:
    """Read what `_write_optimizer` has written. A checkpoint of the model alone has none of it."""
    if not engine.steps_in_backward and (folder / OPTIMIZER).exists():
        # In main memory for one process; several would each need room there for all of it.
        where = engine.device if world_size() > 1 and engine.device.type != "cpu" else "cpu"
        engine.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=where, weights_only=True))
    elif not engine.steps_in_backward:
        logger.warning("%s contains only the model (save_only_model): optimizer and schedule start afresh", folder)
        return
    if not isinstance(engine.schedule, DeepSpeedSchedulerWrapper):
        engine.schedule.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))
    if engine.accelerator.scaler is not None and (folder / SCALER).exists():
        engine.accelerator.scaler.load_state_dict(torch.load(folder / SCALER, weights_only=True))
