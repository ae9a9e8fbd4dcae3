"""The terms of the loss: cross entropy of ordinary tokens, and the three terms of a coordinate."""

from __future__ import annotations

import torch
from torch.nn import functional

from stage2_api.coordinates import BINS
from stage2_trainer.learner.loss_targets import LossOptions

_LARGEST_LOGIT = 1e4
_LEAST_TEMPERATURE = 1e-30  # float32 can hold the largest logit divided by it, and the gradient of that


def _usable(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in float32 without NaN or infinities."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nan_to_num(wide, nan=0.0).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)


def ce_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(_usable(logits), labels, reduction="sum")


def soft_targets(bins: torch.Tensor, options: LossOptions, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return soft targets (C, 1000) around the bins (C,): Gaussians, cut off and normalised at the edges."""
    distance = torch.arange(BINS, device=bins.device)
    # A weight for each distance, in float64 and squared last: no width is so small or large that 0/0 comes out.
    weight = torch.exp(-(distance.double() / options.target_sigma).square() / 2)
    if options.target_truncate is not None:
        weight = weight.masked_fill(distance > options.target_truncate, 0.0)
    weights = weight.to(dtype)[(distance - bins[:, None]).abs()]
    return weights / weights.sum(dim=-1, keepdim=True)


def coord_losses(
    logits: torch.Tensor, bins: torch.Tensor, coord_ids: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """Return the loss (C,) of each coordinate: its soft cross entropy, Wasserstein-1 distance and gate, weighted.

    logits (C, V) predict the coordinates; bins (C,) int64 are the true ones; coord_ids (1000,) the bins' token ids.
    """
    scaled = _usable(logits) / max(options.temperature, _LEAST_TEMPERATURE)
    coords = scaled[:, coord_ids]
    log_p = functional.log_softmax(coords, dim=-1)
    target = soft_targets(bins, options, scaled.dtype)
    soft_ce = -(target * log_p).sum(dim=-1)
    w1 = (log_p.exp() - target).cumsum(dim=-1).abs().mean(dim=-1)
    gate = (scaled.logsumexp(dim=-1) - coords.logsumexp(dim=-1)).clamp_min(0.0)
    return options.soft_ce_weight * soft_ce + options.w1_weight * w1 + options.gate_weight * gate
