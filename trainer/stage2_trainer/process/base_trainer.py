"""The base of every trainer here: a `transformers.Trainer` with whole checkpoints and finite numbers.

`WholeCheckpoints` hands each checkpoint to `run_checkpoints.Checkpoints`; `FiniteSteps` asks a `FiniteGuard` before
each optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from stage2_trainer.activity import Doing
from stage2_trainer.process.finite import FiniteGuard
from stage2_trainer.process.policy import split_learning_rates
from stage2_trainer.process.run_checkpoints import Checkpoints

logger = logging.getLogger(__name__)


class _StepBoundary(TrainerCallback):
    """Tracks whether an optimizer step is half done, and at which step training began."""

    within = False
    began = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step at which training resumes."""
        self.began = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights begin to change."""
        self.within = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights, optimizer, schedule and step count belong to one step again."""
        self.within = False


class StartLogger(TrainerCallback):
    """Logs `start` when training begins: the step at which it resumes, and how many there are in all."""

    def __init__(self, write: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._write = write

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log it."""
        self._write("start", {"step": state.global_step, "max_steps": state.max_steps})


class StepNames(TrainerCallback):
    """Names the step that is under way, in place of what came before."""

    def __init__(self, doing: Doing) -> None:
        self._doing = doing

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the step that begins."""
        self._doing.restart(f"step {state.global_step + 1} of {state.max_steps}")


class WholeCheckpoints(Trainer):
    """A trainer that stages a checkpoint, and names it when all processes have written their part."""

    part_rates: Mapping[str, float] = MappingProxyType({})
    """Learning rates of the model's parts (llm, vit, aligner) that have their own."""

    def __init__(self, *args: Any, checkpoints: Checkpoints, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.save_total_limit = None  # `checkpoints` removes the oldest
        self._checkpoints = checkpoints
        self._aside: Path | None = None
        self._boundary = _StepBoundary()
        self.add_callback(self._boundary)
        self.remove_callback(PrinterCallback)  # the run's log has the figures

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer; some parts of the model may have learning rates of their own."""
        assert self.model is not None, "it trains"
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        split_learning_rates(optimizer, self.model, self.part_rates)
        return optimizer

    def save_beside(self, checkpoint: Path) -> None:
        """Write what else belongs into the checkpoint's folder; each process its own."""

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step of this start, unless it is on disk already.

        Nothing is written in the middle of a step, when some weights have changed and others have not.
        """
        if self._boundary.within:
            logger.warning("the optimizer was in the middle of a step: what it has changed is not saved")
            return
        step = self.state.global_step
        if step <= self._boundary.began:
            return  # one process may have left alone, and asks no other
        if self._checkpoints.is_missing(step):
            assert self.model is not None, "it trains"
            self._save_checkpoint(self.model, trial=None)

    def set_unproved_aside(self) -> None:
        """Rename what was saved since the last proof: a server that is known to be wrong now may have been so then."""
        self._checkpoints.set_unproved_aside(self._boundary.began)

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward pass changes weights: DeepSpeed's engine steps at the end of a window's last one."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write, publish, and remove the oldest.

        Raises:
            CheckpointError: it could not be written: the disk is full, say. Earlier checkpoints are untouched.
        """
        self._checkpoints.save(self.state, partial(self._write, model, trial))

    def _write(self, model: nn.Module, trial: Any, staged: Path) -> None:
        self._aside = staged.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        self.save_beside(staged)


class FiniteSteps(WholeCheckpoints):
    """A trainer that steps on finite gradients only, and saves finite weights only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.model is not None, "it trains"
        self.finite = FiniteGuard(self.model, self.args.device, scaled=bool(self.args.fp16))
        self.add_callback(_FiniteStart(self.finite))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> float | None:
        """Return the norm, which `transformers` asks for before each optimizer step. Raises NonFiniteError."""
        untyped: Any = super()
        norm = untyped._get_grad_norm(model, grad_norm=grad_norm)
        total = self.finite.check(0.0 if norm is None else norm, step=self.state.global_step + 1)
        return None if norm is None else total

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save finite weights. Raises NonFiniteError for others; nothing was written."""
        self.finite.check_weights(step=self.state.global_step)
        super()._save_checkpoint(model, trial)


class _FiniteStart(TrainerCallback):
    """Checks the weights with which training begins."""

    def __init__(self, finite: FiniteGuard) -> None:
        self._finite = finite

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise ConfigError for a weight that is not finite."""
        self._finite.check_start(step=state.global_step)
