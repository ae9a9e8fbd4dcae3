"""A `transformers.Trainer` with the checkpoints, the finite numbers and the log of a run of stage2.

Each checkpoint is handed to `run_checkpoints.Checkpoints`, and a `FiniteGuard` is asked before each optimizer step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from stage2_trainer.model.best_checkpoint import forget_other_figure
from stage2_trainer.model.checkpoints import divided_among
from stage2_trainer.model.deepspeed_compat import load_undivided
from stage2_trainer.model.deepspeed_config import as_config_errors, settle_options
from stage2_trainer.model.finite import FiniteGuard
from stage2_trainer.model.policy import split_learning_rates
from stage2_trainer.model.run_checkpoints import Checkpoints
from stage2_trainer.process.activity import ACTIVITY, Doing
from stage2_trainer.telemetry.run_log import EventLog

logger = logging.getLogger(__name__)


class CheckedTrainer(Trainer):
    """A trainer that steps on finite gradients only, and names a checkpoint when all processes have written their part.

    part_rates: learning rates of the model's parts (llm, vit, aligner) that have their own.
    """

    def __init__(
        self, *args: Any, checkpoints: Checkpoints, event_log: EventLog, part_rates: Mapping[str, float], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        assert self.model is not None, "it trains"
        self.args.save_total_limit = None  # `checkpoints` removes the oldest
        self.finite = FiniteGuard(self.model, self.args.device, scaled=bool(self.args.fp16))
        self._checkpoints, self._part_rates = checkpoints, part_rates
        self._aside: Path | None = None
        self._rate = 0.0  # of the last step, with DeepSpeed
        self._course = _Course(self.finite, event_log)
        self.add_callback(self._course)
        self.remove_callback(PrinterCallback)  # the run's log has the figures

    def train(self, resume_from_checkpoint: Path | str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end, from the beginning or from a checkpoint."""
        checkpoint = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, (Path, str)) else None
        if checkpoint is not None:
            self.args.eval_on_start = False
            if self.is_deepspeed_enabled and divided_among(checkpoint) not in (0, self.args.world_size):
                load_undivided(self, checkpoint)
        with ACTIVITY.doing(f"resuming from {checkpoint}" if checkpoint else "starting to train") as doing:
            self._course.doing = doing
            return super().train(None if checkpoint is None else str(checkpoint), *args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer; some parts of the model may have learning rates of their own."""
        assert self.model is not None, "it trains"
        if self.optimizer is not None:  # created already, or to be built by DeepSpeed
            return self.optimizer
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        split_learning_rates(optimizer, self.model, self._part_rates)
        return optimizer

    def save_beside(self, checkpoint: Path) -> None:
        """Write what else belongs into the checkpoint's folder; each process its own."""

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step of this start, unless it is on disk already.

        Nothing is written in the middle of a step, when some weights have changed and others have not.
        """
        if self._course.within:
            logger.warning("stopped in the middle of an optimizer step: its changes are not saved")
            return
        step = self.state.global_step
        if step <= self._course.began:
            return  # one process may have left alone, and asks no other
        if self._checkpoints.is_missing(step):
            assert self.model is not None, "it trains"
            self._save_checkpoint(self.model, trial=None)

    def set_unproved_aside(self) -> None:
        """Rename what was saved since the last proof: a server that is known to be wrong now may have been so then."""
        self._checkpoints.set_unproved_aside(self._course.began)

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward pass changes weights: DeepSpeed's engine steps at the end of a window's last one."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    def note_backward(self) -> None:
        """Note that a backward pass begins, which with DeepSpeed may change weights and the learning rate."""
        self._course.within = self.steps_in_backward and self.accelerator.sync_gradients
        if self._course.within and self.optimizer is not None:
            self._rate = float(self.optimizer.param_groups[0]["lr"])

    def _prepare_for_training(self, max_steps: int, *others: Any) -> Any:
        """Prepare model, optimizer and schedule.

        Raises:
            ConfigError: DeepSpeed and the training section differ, or DeepSpeed cannot build optimizer or schedule.
        """
        untyped: Any = super()
        if not self.is_deepspeed_enabled:
            return untyped._prepare_for_training(max_steps, *others)
        settle_options(self.accelerator.state.deepspeed_plugin.hf_ds_config, self.args, self.model, max_steps)
        with as_config_errors():
            return untyped._prepare_for_training(max_steps, *others)

    def _get_learning_rate(self) -> float:
        """Return the rate of the step, which DeepSpeed's backward pass may have taken already, schedule and all."""
        return self._rate if self.steps_in_backward else super()._get_learning_rate()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> float | None:
        """Return the norm, which `transformers` asks for before each optimizer step. Raises NonFiniteError."""
        untyped: Any = super()
        norm = untyped._get_grad_norm(model, grad_norm=grad_norm)
        total = self.finite.check(0.0 if norm is None else norm, step=self.state.global_step + 1)
        return None if norm is None else total

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write, publish, and remove the oldest.

        Raises:
            NonFiniteError: a weight is not finite; nothing was written.
            CheckpointError: it could not be written: the disk is full, say. Earlier checkpoints are untouched.
        """
        self.finite.check_weights(step=self.state.global_step)
        self._checkpoints.save(self.state, partial(self._write, model, trial))

    def _write(self, model: nn.Module, trial: Any, staged: Path) -> None:
        self._aside = staged.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        self.save_beside(staged)


class _Course(TrainerCallback):
    """A callback that follows a run: its first step, its log, and whether a step is half done."""

    def __init__(self, finite: FiniteGuard, event_log: EventLog) -> None:
        self._finite, self._log = finite, event_log
        self.within = False
        self.began = 0
        self.doing: Doing | None = None
        """What the run does, by name."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check and log what training begins with. Raises ConfigError for a weight that is not finite."""
        self.began = state.global_step
        self._finite.check_start(step=state.global_step)
        forget_other_figure(args, state)
        begun = {"step": state.global_step, "max_steps": state.max_steps, "processes": args.world_size}
        self._log.write("start", begun)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the step that begins."""
        if self.doing is not None:
            self.doing.restart(f"step {state.global_step + 1} of {state.max_steps}")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights begin to change."""
        self.within = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights, optimizer, schedule and step count belong to one step again."""
        self.within = False
