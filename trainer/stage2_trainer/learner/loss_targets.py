"""The inputs of the loss beside logits: its options, and the targets of the supervised positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stage2_api.rollout_matching import LossNormalizer, RolloutMatching
from stage2_trainer.matching.masks import IGNORED, Supervision
from stage2_trainer.matching.raster import FloatArray
from stage2_trainer.process.ranks import gathered

_CONFIG = RolloutMatching()


@dataclass(frozen=True)
class LossOptions:
    """Weights and shapes of the coordinate losses.

    soft_ce_weight, w1_weight, gate_weight: factors of the three terms. temperature: softmax temperature of all three.
    target_sigma: standard deviation of the soft target in bins; target_truncate: radius in bins beyond which it is
    zero.
    normalizer: what the loss is a mean over: each micro-step, or the accumulation window (`window_means`).
    """

    soft_ce_weight: float = _CONFIG.soft_ce_weight
    w1_weight: float = _CONFIG.w1_weight
    gate_weight: float = _CONFIG.gate_weight
    temperature: float = _CONFIG.temperature_coord
    target_sigma: float = _CONFIG.target_sigma
    target_truncate: int | None = _CONFIG.target_truncate
    normalizer: LossNormalizer = _CONFIG.loss_normalizer

    @classmethod
    def from_config(cls, rollout_matching: RolloutMatching) -> LossOptions:
        """Return the options that `custom.extra.rollout_matching` asks for."""
        return cls(
            soft_ce_weight=rollout_matching.soft_ce_weight,
            w1_weight=rollout_matching.w1_weight,
            gate_weight=rollout_matching.gate_weight,
            temperature=rollout_matching.temperature_coord,
            target_sigma=rollout_matching.target_sigma,
            target_truncate=rollout_matching.target_truncate,
            normalizer=rollout_matching.loss_normalizer,
        )


@dataclass(frozen=True)
class LossTargets:
    """The targets of N supervised positions: first K ordinary tokens, then C coordinates (N = K + C).

    positions (N,) int64: where they stand; the hidden state or logits at `logit_positions` = positions - 1 predict
    them. labels (K,) int64 token ids; bins (C,) int64; in_prefix (C,) bool: in the rollout's prefix, else in the tail;
    prefix_count: how many are there. weights (K,) float32: factors of the ordinary tokens' losses, below 0 where a
    token is taught against; None: all are 1. coord_weights (C,) float32: factors of the coordinates' losses; None: all
    are 1.
    ce_denominator, coord_denominator: what the sums are divided by. The numbers of positions make plain means; totals
    of an accumulation window make a loss that does not depend on how segments are spread over micro-steps.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    bins: torch.Tensor
    in_prefix: torch.Tensor
    prefix_count: int
    ce_denominator: float
    coord_denominator: float
    weights: torch.Tensor | None = None
    coord_weights: torch.Tensor | None = None

    @property
    def logit_positions(self) -> torch.Tensor:
        """The positions whose logits predict the supervised ones, (N,) int64."""
        return self.positions - 1

    def parts(self) -> tuple[LossTargets, LossTargets]:
        """Return the targets of ordinary tokens and those of coordinates; their losses are sums."""
        split = len(self.labels)
        ordinary = replace(
            self,
            positions=self.positions[:split],
            bins=self.bins[:0],
            in_prefix=self.in_prefix[:0],
            prefix_count=0,
            coord_weights=None,
        )
        coords = replace(self, positions=self.positions[split:], labels=self.labels[:0], weights=None)
        return ordinary.divided_by(ce=1.0, coord=1.0), coords.divided_by(ce=1.0, coord=1.0)

    def divided_by(self, *, ce: float, coord: float) -> LossTargets:
        """Return the same targets with other denominators."""
        return replace(self, ce_denominator=ce, coord_denominator=coord)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of this machine's memory on the device, without waiting for what that computes meanwhile."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def loss_targets(supervision: Supervision, device: torch.device | str = "cpu") -> LossTargets:
    """Return the targets of one row (or of several rows, laid out one after the other)."""
    ce_positions = np.flatnonzero(supervision.labels != IGNORED)

    def tensor(values: Any) -> torch.Tensor:
        return moved(torch.as_tensor(values), torch.device(device))

    def factors(values: FloatArray | None) -> torch.Tensor | None:
        return None if values is None else tensor(values.astype(np.float32))

    return LossTargets(
        positions=tensor(np.concatenate([ce_positions, supervision.coord_positions])),
        labels=tensor(supervision.labels[ce_positions]),
        bins=tensor(supervision.coord_targets),
        in_prefix=tensor(supervision.coord_in_prefix),
        prefix_count=int(np.count_nonzero(supervision.coord_in_prefix)),
        ce_denominator=max(len(ce_positions), 1),
        coord_denominator=max(len(supervision.coord_positions), 1),
        weights=factors(None if supervision.weights is None else supervision.weights[ce_positions]),
        coord_weights=factors(supervision.coord_weights),
    )


def window_means(micro_steps: Sequence[LossTargets]) -> list[LossTargets]:
    """Return the targets of all micro-steps of an accumulation window, divided so that their losses make one mean.

    The loss of the window is the mean of its micro-steps' losses. Here that is the mean over all positions of the
    window in all learner processes, however they are spread over micro-steps (semantics, section 17). All processes
    must call it.
    """
    counts = sum(len(one.labels) for one in micro_steps), sum(len(one.bins) for one in micro_steps)
    ce, coord = denominators(counts)
    return [one.divided_by(ce=ce / len(micro_steps), coord=coord / len(micro_steps)) for one in micro_steps]


def denominators(counts: tuple[int, int]) -> tuple[float, float]:
    """Return what sums over this process's tokens and coordinates are divided by, for means over those of all.

    counts: the process's own. Gradients are averaged over processes: that is why a share of all counts is returned.
    All processes must call it.
    """
    everywhere = gathered(counts)
    ce, coord = (sum(column) / len(everywhere) for column in zip(*everywhere, strict=True))
    return ce or 1.0, coord or 1.0
