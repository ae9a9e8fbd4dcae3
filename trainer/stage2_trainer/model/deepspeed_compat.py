"""Workarounds for DeepSpeed.

`GatheredWeights` gathers the weights that ZeRO-3 has spread over the processes. For servers it does so bucket by
bucket, while the first process pushes. For a rollout of the processes themselves all weights are whole: each process
then generates by itself, as many tokens as it needs. ZeRO's hooks would release every layer after its first use, so
they are removed meanwhile, through DeepSpeed's private fields, as `unwrap_model_for_generation` does
(huggingface/trl#1617, deepspeedai/DeepSpeed#5658). Restoring them leaves the coordinator's trace stale unless DeepSpeed
drops it (deepspeedai/DeepSpeed#8043, in 0.19.8). It goes when DeepSpeed has a public context manager for this that
takes the engine.

`undivided` resumes with another number of processes. ZeRO-3 (deepspeedai/DeepSpeed#5475, as of 0.19.8) then gives
all parameter groups the options of the first, weight decay too, and one count of steps, which each group's step raises.
The mend goes when it restores each group's own; no upstream issue found.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.model.checkpoints import divided_among
from stage2_trainer.process.ranks import gathered, host_group, rank, world_size
from stage2_trainer.sync.tensors.announcement import DEFAULT_BUCKET_BYTES
from stage2_trainer.sync.tensors.merge import T, WeightAccess

GatherWeights = Callable[[Any], AbstractContextManager[object]]
"""Returns a context in which all weights of a model are whole in this process."""
_UNDIVIDED = "universal"
"""The folder of a checkpoint that holds its state in one piece while it is loaded."""


def compile_nothing() -> None:
    """Keep DeepSpeed on CPUs from compiling an all-reduce over shared memory at its first start; gloo reduces instead.

    Compiling takes minutes and a C++ compiler. Call it before processes join: DeepSpeed fills this attribute at its
    first use, by trying to compile other things. No upstream issue found. It goes when an option turns this off.
    """
    import deepspeed.ops

    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


class GatheredWeights(WeightAccess):
    """Weights that ZeRO-3 spreads: whole in all processes for a block, or read by the first one, which pushes them.

    What the first process reads, the others gather with it, and all release it when the next step begins: with
    DeepSpeed's `enable_sanity_checks` they meet there. `find_engine` returns DeepSpeed's engine once training has
    begun. `together` lets the other processes `follow` a step for the time of a block.
    """

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        super().__init__(bucket_bytes)
        self.find_engine: Callable[[], Any] = lambda: None
        self.together: Callable[..., AbstractContextManager[None]] = lambda *step: nullcontext()
        self._held = ExitStack()

    def gather(self, parameters: Sequence[torch.Tensor]) -> None:
        ids = [one.ds_id for one in parameters if hasattr(one, "ds_id")]
        self._take(GatheredWeights._hold, ids)

    def compute(self, work: Callable[..., T], model: Any, *arguments: Any) -> T:
        found: T = self._take(GatheredWeights._run, work, *arguments)
        return found

    def follow(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Take a step of the first process, in each process."""
        self.let_go()
        return step(self, *arguments)

    def let_go(self) -> None:
        """Let go of what the last step gathered. All processes must call it."""
        self._held.close()

    def _take(self, step: Callable[..., Any], *arguments: Any) -> Any:
        with self.together(step, *arguments):
            return self.follow(step, *arguments)

    def _hold(self, ids: Sequence[int]) -> None:
        """Gather the parameters that DeepSpeed has given these numbers, the same in each process."""
        import deepspeed

        if ids:
            chosen = [one for one in self.find_engine().module.parameters() if one.ds_id in ids]
            self._held.enter_context(deepspeed.zero.GatheredParameters(chosen))

    def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run a forward pass, for which ZeRO gathers layer by layer; afterwards nothing stays whole or on its way."""
        engine = self.find_engine()
        root = engine.module  # ZeRO's hooks follow its forward pass
        inside = getattr(root, "compute", None)
        found: T = inside(work, *arguments) if inside else work(root, *arguments)
        engine.empty_partition_cache()
        return found

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        """Gather the weights in all processes, and spread them again. All processes must call it."""
        import deepspeed

        hooks = self.find_engine().optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            start = hooks.module._forward_pre_hooks[hooks.fwd_pre_hook.id]  # it would meet the other processes
            _remove(hooks)
            try:
                yield
            finally:
                hooks.fwd_pre_hook = hooks.module.register_forward_pre_hook(start)
                hooks._register_deepspeed_module(hooks.module)


def _remove(hooks: Any) -> None:
    for parameter in hooks.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hook in (*hooks.forward_hooks, *hooks.backward_hooks, hooks.fwd_pre_hook):
        hook.remove()
    hooks.forward_hooks, hooks.backward_hooks = [], []


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
