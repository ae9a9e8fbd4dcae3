"""The policy with its loss: a module whose forward pass turns a row's tensors into loss parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.learner.loss import LossParts, LossTargets, stage2_loss_from_hidden
from stage2_trainer.learner.padding_free_batch import hidden_states
from stage2_trainer.model.policy import output_table, rope_model

T = TypeVar("T")


class TrainedRow(nn.Module):
    """The policy with its loss.

    DistributedDataParallel and DeepSpeed gather and reduce around a `forward`, so whatever trains must happen in one.
    Its children are the policy's own, so that weights have the policy's names in what DeepSpeed writes.

    coord_ids: of the coordinate tokens. autocast: returns the mixed precision that the whole model would run in.
    """

    policy: nn.Module
    _coord_ids: Tensor

    def __init__(
        self,
        policy: nn.Module,
        coord_ids: Tensor,
        options: RolloutMatching,
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.__dict__ |= {"policy": policy, "_modules": policy._modules, "_parameters": policy._parameters}
        self._options = options
        self._autocast = autocast
        self.register_buffer("_coord_ids", coord_ids, persistent=False)

    def forward(
        self,
        inputs: Mapping[str, Any],
        targets: LossTargets,
        *,
        apart: bool = False,
        work: Callable[[], Any] | None = None,
    ) -> Any:
        """Return the row's LossParts, from hidden states to logits and loss only where the row is supervised.

        apart: return two LossParts, of ordinary tokens and of coordinates, as sums, from one forward pass. work: return
        its result instead; see `compute`.
        """
        if work is not None:
            return work()
        with self._autocast():
            hidden = hidden_states(rope_model(self.policy), inputs).flatten(0, 1)
        # Whoever wraps this module may put autocast around its forward pass; logits and loss stay in float32.
        with torch.autocast(hidden.device.type, enabled=False):
            if apart:
                return tuple(self._loss(hidden, part) for part in targets.parts())
            return self._loss(hidden, targets)

    def compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return `work(policy, *arguments)`, run as a forward pass of this module: ZeRO-3 has its hooks here."""
        found: T = self({}, None, work=partial(work, self.policy, *arguments))
        return found

    def train(self, mode: bool = True) -> TrainedRow:
        """Set the mode of the policy, too."""
        self.policy.train(mode)
        return super().train(mode)

    def _loss(self, hidden: Tensor, targets: LossTargets) -> LossParts:
        table, bias = output_table(self.policy)
        supervised = hidden[targets.logit_positions].to(table.dtype)
        return stage2_loss_from_hidden(supervised, table, targets, self._coord_ids, self._options, bias=bias)
