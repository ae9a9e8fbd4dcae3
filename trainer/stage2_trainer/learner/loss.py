"""The loss: cross entropy on text, a soft and a cumulative distance on coordinates, and a gate that keeps them
coordinates.

Only supervised positions enter, so memory grows with them and not with the sequence; `stage2_loss_from_hidden` goes on
to compute logits and their gradients in portions, so it does not grow with positions x vocabulary either.
Source: semantics, section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stage2_trainer.learner.chunked_loss import ChunkedLoss, LossInputs
from stage2_trainer.learner.loss_targets import LossOptions, LossTargets, loss_targets, normalized
from stage2_trainer.learner.loss_terms import ce_sum, coord_losses, soft_targets

__all__ = [
    "LossOptions",
    "LossParts",
    "LossTargets",
    "coord_losses",
    "loss_targets",
    "normalized",
    "soft_targets",
    "stage2_loss",
    "stage2_loss_from_hidden",
]

_CHUNK_ELEMENTS = 2**26


@dataclass(frozen=True)
class LossParts:
    """The loss and what it is made of. `total` = ce + coord carries gradients; the others, scalars too, are for the
    log.

    coord_prefix and coord_tail are means over the coordinates of the prefix and of the tail; 0 where there are none.
    """

    total: torch.Tensor
    ce: torch.Tensor
    coord: torch.Tensor
    coord_prefix: torch.Tensor
    coord_tail: torch.Tensor
    ce_count: int
    coord_prefix_count: int
    coord_tail_count: int

    def figures(self) -> dict[str, float]:
        """Return the record's `loss` and `loss/*`."""
        return {
            "loss": float(self.total.detach()),
            "loss/ce": float(self.ce),
            "loss/coord": float(self.coord),
            "loss/coord_prefix": float(self.coord_prefix),
            "loss/coord_tail": float(self.coord_tail),
        }


def stage2_loss(logits: torch.Tensor, targets: LossTargets, coord_ids: torch.Tensor, options: LossOptions) -> LossParts:
    """Return the loss from the logits (N, V) at `targets.logit_positions`.

    coord_ids: the bins' token ids, (1000,) int64. options: weights, temperature and target width of the coordinates.

    float32 (float64 for float64 logits). Finite for any logits: NaN counts as 0, and all are clamped to +-1e4.
    """
    split = len(targets.labels)
    ce = ce_sum(logits[:split], targets.labels) / targets.ce_denominator
    each = coord_losses(logits[split:], targets.bins, coord_ids, options)
    coord = each.sum() / targets.coord_denominator
    return _parts(ce + coord, ce.detach(), coord.detach(), each.detach(), targets)


def stage2_loss_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: LossTargets,
    coord_ids: torch.Tensor,
    options: LossOptions,
    *,
    bias: torch.Tensor | None = None,
    chunk_elements: int = _CHUNK_ELEMENTS,
) -> LossParts:
    """Return the same loss from the hidden states (N, H) at `targets.logit_positions` and the output layer.

    weight (V, H), bias (V,) or None: the output layer. coord_ids, options: as in `stage2_loss`.

    At most `chunk_elements` logits exist at a time; their gradients are computed with them, so nothing is computed
    twice.
    """
    inputs = LossInputs(targets, coord_ids, options, max(1, chunk_elements // weight.shape[0]), torch.is_grad_enabled())
    total, ce, coord, each = ChunkedLoss.apply(hidden, weight, bias, inputs)  # type: ignore[no-untyped-call]
    return _parts(total, ce, coord, each, targets)


def _parts(
    total: torch.Tensor, ce: torch.Tensor, coord: torch.Tensor, each: torch.Tensor, targets: LossTargets
) -> LossParts:
    prefix, tail = each[targets.in_prefix], each[~targets.in_prefix]
    return LossParts(
        total=total,
        ce=ce,
        coord=coord,
        coord_prefix=prefix.sum() / max(len(prefix), 1),
        coord_tail=tail.sum() / max(len(tail), 1),
        ce_count=len(targets.labels),
        coord_prefix_count=len(prefix),
        coord_tail_count=len(tail),
    )
