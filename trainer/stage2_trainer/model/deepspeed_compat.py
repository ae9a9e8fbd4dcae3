"""Workarounds for DeepSpeed at its start on CPUs, and as it resumes with another number of processes.

ZeRO-3 (deepspeedai/DeepSpeed#5475, as of 0.19.8) then gives all parameter groups the options of the first, weight decay
too, and one count of steps, which each group's step raises. The mend goes when it restores each group's own; no
upstream issue found.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.model.checkpoints import divided_among
from stage2_trainer.process.ranks import gathered, host_group, rank, world_size

_UNDIVIDED = "universal"
"""The folder of a checkpoint that holds its state in one piece while it is loaded."""


def compile_nothing() -> None:
    """Keep DeepSpeed on CPUs from compiling an all-reduce over shared memory at its first start; gloo reduces instead.

    Compiling takes minutes and a C++ compiler. Call it before processes join: DeepSpeed fills this attribute at its
    first use, by trying to compile other things. No upstream issue found. It goes when an option turns this off.
    """
    import deepspeed.ops

    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


@contextmanager
def undivided(engine: Any, checkpoint: Path) -> Iterator[None]:
    """Let DeepSpeed's engine load a checkpoint in the block, also one of another number of processes.

    The first process writes such a state in one piece into the checkpoint's folder (DeepSpeed's universal checkpoint),
    of which each process loads its part; it is removed afterwards. All processes must call it.

    Raises:
        ConfigError: the state cannot be divided anew.
    """
    if divided_among(checkpoint) in (0, world_size()):
        yield
        return
    group = _put_together(checkpoint)
    engine._config.load_universal_checkpoint = True  # DeepSpeed asks when it loads, and has no other way to say so
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False
    _mend(engine.optimizer.optimizer, checkpoint)
    gathered(None, group)  # a barrier
    if rank() == 0:
        _remove_undivided(checkpoint)


def load_undivided(trainer: Any, checkpoint: Path) -> None:
    """Let a trainer of transformers resume from a checkpoint of another number of processes; see `undivided`.

    What was written is removed once training begins. All processes must call it.

    Raises:
        ConfigError: the state cannot be divided anew.
    """
    group = _put_together(checkpoint)
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["checkpoint"] = {"load_universal": True}
    trainer.add_callback(_UndividedState(trainer, checkpoint, group))


def _put_together(checkpoint: Path) -> Any:
    """Let the first process write the state in one piece; return a group in which all processes meet."""
    group, why = host_group(), None
    if rank() == 0:
        try:
            _write_undivided(checkpoint)
        except (LookupError, AssertionError, RuntimeError, ValueError) as error:  # an optimizer other than Adam, say
            why = f"{type(error).__name__}: {error}"
    for reason in filter(None, gathered(why, group)):
        rule = f"another number of processes wrote {checkpoint}, and DeepSpeed cannot divide its state anew ({reason})"
        way_out = "start as many as then (spec.learner.gpus, --processes), or name another training.output_dir"
        raise ConfigError([Problem("WORLD_SIZE", world_size(), rule, way_out)])
    return group


def _mend(optimizer: Any, checkpoint: Path) -> None:
    """Restore each parameter group's own options, and give each its own count of steps."""
    saved = torch.load(checkpoint / _UNDIVIDED / "zero" / "optimizer_state.pt", map_location="cpu")
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group |= {key: value for key, value in options.items() if key != "params"}
    for moments in optimizer.state.values():
        moments["step"] = deepcopy(moments["step"])


def _write_undivided(checkpoint: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    _remove_undivided(checkpoint)
    tag = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    options = {
        "input_folder": str(checkpoint / tag),
        "output_folder": str(checkpoint / _UNDIVIDED),
        "num_extract_workers": 1,  # others would load what a pickle names
        "num_merge_workers": 1,
        "keep_temp_folder": False,
        "strict": True,
        "inject_missing_state": True,
    }
    with redirect_stdout(sys.stderr):
        ds_to_universal.main(Namespace(**options))


def _remove_undivided(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / _UNDIVIDED, ignore_errors=True)
    (checkpoint / f"latest_{_UNDIVIDED}").unlink(missing_ok=True)


class _UndividedState(TrainerCallback):
    """Repairs the optimizer after it was loaded from an undivided state, and removes that state's files."""

    def __init__(self, trainer: Any, checkpoint: Path, group: Any) -> None:
        self._trainer, self._checkpoint, self._group = trainer, checkpoint, group

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Repair the optimizer, and remove the files of the undivided state."""
        _mend(self._trainer.model_wrapped.optimizer.optimizer, self._checkpoint)
        gathered(None, self._group)  # a barrier
        if rank() == 0:
            _remove_undivided(self._checkpoint)
