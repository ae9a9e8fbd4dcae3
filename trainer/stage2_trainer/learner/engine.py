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
from stage2_trainer.learner.optimizer import create_optimizer, create_schedule
from stage2_trainer.learner.trained_row import TrainedRow
from stage2_trainer.matching import CoordVocab


class AccelerateEngine:
    """The policy, wrapped and with an optimizer.

    max_steps: optimizer steps of the run. rates: learning rates of the parts (llm, vit, aligner) that have their own.
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
    ) -> None:
        self.policy, self.args = policy, args
        self.device: torch.device = args.device
        # Checkpointing runs forward passes again, which the search for unused parameters takes for others.
        unused = not (isinstance(policy, PreTrainedModel) and args.gradient_checkpointing)
        self._accelerator = Accelerator(
            mixed_precision=args.mixed_precision,
            cpu=args.use_cpu,
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
        )
        if args.gradient_checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        policy.to(self.device)
        coord_ids = torch.as_tensor(vocab.ids, device=self.device)
        row = TrainedRow(policy, coord_ids, loss, self._accelerator.autocast)
        self.wrapped, self.optimizer = self._accelerator.prepare(row, create_optimizer(policy, args, rates))
        self.schedule = create_schedule(self.optimizer, args, max_steps)

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """The parameters that train."""
        return [one for one in self.policy.parameters() if one.requires_grad]

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay with the parameters until the optimizer steps."""
        return bool(self._accelerator.distributed_type == DistributedType.NO)

    @contextmanager
    def run_pass(self, *, last: bool) -> Iterator[None]:
        """Prepare a forward and a backward pass. last: gradients are reduced over processes."""
        self.wrapped.train()
        with nullcontext() if last else self._accelerator.no_sync(self.wrapped):
            yield

    def row(self, inputs: Mapping[str, Any], targets: LossTargets, *, apart: bool = False) -> Any:
        """Run the forward pass of `TrainedRow`."""
        there = {name: moved(one, self.device) if isinstance(one, Tensor) else one for name, one in inputs.items()}
        return self.wrapped(there, targets, apart=apart)

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass of a loss that is divided already."""
        self._accelerator.backward(loss)

    def step(self, check: Callable[[Tensor], float]) -> tuple[float, float]:
        """Clip, check the gradient norm, and step optimizer and schedule. Returns the norm, and the step's rate."""
        most = self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf
        norm = check(self._accelerator.clip_grad_norm_(self.wrapped.parameters(), most))
        self.optimizer.step()
        rate = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
        self.wrapped.zero_grad()
        return norm, rate
