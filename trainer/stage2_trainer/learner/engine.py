"""The engine: the policy as accelerate wraps it, its optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import LossTargets, moved
from stage2_trainer.learner.optimizer import create_for_deepspeed, create_optimizer, create_schedule
from stage2_trainer.learner.trained_row import TrainedRow
from stage2_trainer.matching import CoordVocab
from stage2_trainer.model.deepspeed_config import as_config_errors
from stage2_trainer.process.interrupt import Interrupt


class AccelerateEngine:
    """The policy, wrapped and with an optimizer.

    max_steps: optimizer steps of the run. rates: learning rates of the parts (llm, vit, aligner) that have their own.
    interrupt: waits while DeepSpeed changes weights.
    """

    def __init__(
        self,
        policy: Any,
        args: TrainingArguments,
        *,
        loss: RolloutMatching,
        vocab: CoordVocab,
        max_steps: int,
        rates: Mapping[str, float],
        interrupt: Interrupt,
    ) -> None:
        self.policy, self.args, self._interrupt = policy, args, interrupt
        self.stepping = False
        """Whether some weights may have changed and others not: nothing may be saved."""
        self.device: torch.device = args.device
        self.accelerator = make_accelerator(policy, args)
        if args.gradient_checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        row = TrainedRow(policy, torch.as_tensor(vocab.ids, device=self.device), loss, self.accelerator.autocast)
        if self.steps_in_backward:
            config = self.accelerator.state.deepspeed_plugin.hf_ds_config
            self._dtype: torch.dtype | None = config.dtype()
            parts = create_for_deepspeed(policy, args, rates, max_steps, config)
        else:
            self._dtype = None
            policy.to(self.device)
            parts = [create_optimizer(policy, args, rates)]
        with as_config_errors() if self.steps_in_backward else nullcontext():
            self.wrapped, self.optimizer, *schedule = self.accelerator.prepare(row, *parts)
        self.schedule = schedule[0] if schedule else create_schedule(self.optimizer, args, max_steps)

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that train."""
        return [one for one in self.policy.parameters() if one.requires_grad]

    @property
    def steps_in_backward(self) -> bool:
        """Whether the last backward pass of a step changes weights, as DeepSpeed's does."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay with the parameters, unscaled, until the optimizer steps.

        DistributedDataParallel reduces them, DeepSpeed consumes them at once, and float16 scales them.
        """
        return self.accelerator.distributed_type == DistributedType.NO and self.accelerator.scaler is None

    @contextmanager
    def run_pass(self, *, last: bool) -> Iterator[None]:
        """Prepare a forward and a backward pass. last: gradients are reduced over processes, and DeepSpeed steps."""
        self.wrapped.train()
        if last and self.steps_in_backward:
            self._interrupt.hold()
        self.accelerator.sync_gradients = last
        with nullcontext() if last or self.steps_in_backward else self.accelerator.no_sync(self.wrapped):
            yield

    def row(self, inputs: Mapping[str, Any], targets: LossTargets, *, apart: bool = False) -> Any:
        """Run the forward pass of `TrainedRow`."""
        there = {name: self._there(one) if isinstance(one, Tensor) else one for name, one in inputs.items()}
        return self.wrapped(there, targets, apart=apart)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass of a loss that is divided already."""
        self.stepping = self.steps_in_backward and self.accelerator.sync_gradients
        self._rate = self._current_rate()  # DeepSpeed steps a schedule, too
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if self.steps_in_backward else {}))

    def step(self, check: Callable[[Tensor | float], float]) -> tuple[float | None, float]:
        """Clip, check the gradient norm, and step optimizer and schedule. Returns the norm, and the step's rate.

        DeepSpeed has clipped and stepped already, and says what the norm was; None where it measures none.
        """
        most = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        found = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), most)
        norm = check(0.0 if found is None else found)
        self.optimizer.step()
        rate = self._rate if self.steps_in_backward else self._current_rate()
        if not self.accelerator.optimizer_step_was_skipped:
            self.schedule.step()
        self.wrapped.zero_grad()
        return (None if found is None else norm), rate

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the policy's device; DeepSpeed's weights are of one dtype, which inputs share."""
        there = moved(tensor, self.device)
        return there.to(self._dtype) if self._dtype is not None and there.is_floating_point() else there

    def _current_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def make_accelerator(policy: Any, args: TrainingArguments) -> Accelerator:
    """Return an accelerator that neither counts micro-steps nor divides losses, on the device of `args`."""
    # Checkpointing runs forward passes again, which the search for unused parameters takes for others.
    unused = not (isinstance(policy, PreTrainedModel) and args.gradient_checkpointing)
    return Accelerator(
        mixed_precision=args.mixed_precision,
        deepspeed_plugin=args.deepspeed_plugin,
        gradient_accumulation_steps=1,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
    )
