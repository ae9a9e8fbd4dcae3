"""The tensors of micro-steps: rows laid out padding-free, and the targets of their supervised positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stage2_api.rollout_matching import LossNormalizer
from stage2_trainer.learner.loss import loss_targets, normalized
from stage2_trainer.learner.padding_free_batch import collate, row_supervision
from stage2_trainer.learner.row_planner import Row
from stage2_trainer.matching import CoordVocab


def supervised_batches(
    micro_steps: Sequence[Sequence[Row]],
    vocab: CoordVocab,
    *,
    pad_token_id: int,
    normalizer: LossNormalizer,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return for each micro-step's rows the model's inputs (`model`, on the CPU) and the loss's targets (`targets`).

    The tensors are new ones, so that a step cannot change what is kept for the next.
    """
    laid_out = [collate([[segment.placed for segment in row] for row in rows], pad_token_id) for rows in micro_steps]
    targets = [
        loss_targets(row_supervision(batch, [[segment.meta for segment in row] for row in rows], vocab), device)
        for batch, rows in zip(laid_out, micro_steps, strict=True)
    ]
    return [
        {"model": batch.model_inputs(), "targets": one}
        for batch, one in zip(laid_out, normalized(targets, normalizer), strict=True)
    ]
