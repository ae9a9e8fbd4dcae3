"""The loss: cross entropy on text, a soft and a cumulative distance on coordinates, and a gate that keeps them
coordinates.

Only supervised positions enter, so memory grows with them and not with the sequence. `stage2_loss_from_hidden` computes
logits and their gradients in chunks, so memory does not grow with positions x vocabulary either.
Source: semantics, section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stage2_api.coordinates import BINS
from stage2_api.rollout_matching import RolloutMatching
from stage2_trainer.matching.masks import IGNORED, Supervision
from stage2_trainer.process.ranks import gathered
from stage2_trainer.wire.requests import share

CHUNK_ELEMENTS = 2**26
_LARGEST_LOGIT = 1e4
_LEAST_TEMPERATURE = 1e-30  # float32 can hold the largest logit divided by it, and the gradient of that


@dataclass(frozen=True)
class LossTargets:
    """The targets of N supervised positions: first K ordinary tokens, then C coordinates (N = K + C).

    positions (N,) int64: the hidden state or logits at `logit_positions` = positions - 1 predict them. labels (K,)
    int64 token ids; bins (C,) int64; in_prefix (C,) bool: in the rollout's prefix, else in the tail; prefix_count: how
    many are in the prefix. weights (K,) float32: factors of the ordinary tokens' losses, below 0 for unlikelihood;
    None: all are 1.
    ce_denominator, coord_denominator: divide the sums. The numbers of positions make plain means; totals of an
    accumulation window make a loss that does not depend on how segments are spread over micro-steps.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    bins: torch.Tensor
    in_prefix: torch.Tensor
    prefix_count: int
    ce_denominator: float
    coord_denominator: float
    weights: torch.Tensor | None = None

    @property
    def logit_positions(self) -> torch.Tensor:
        """The positions whose logits predict the supervised ones, (N,) int64."""
        return self.positions - 1

    def parts(self) -> tuple[LossTargets, LossTargets]:
        """Return the targets of ordinary tokens and those of coordinates; their losses are sums."""
        split = len(self.labels)
        ordinary = replace(
            self, positions=self.positions[:split], bins=self.bins[:0], in_prefix=self.in_prefix[:0], prefix_count=0
        )
        coords = replace(self, positions=self.positions[split:], labels=self.labels[:0], weights=None)
        return ordinary.divided_by(ce=1.0, coord=1.0), coords.divided_by(ce=1.0, coord=1.0)

    def without_loss(self) -> LossTargets:
        """Return the targets of the same rows without a supervised position."""
        ordinary, _ = self.parts()
        return replace(ordinary, positions=self.positions[:0], labels=self.labels[:0], weights=None)

    def divided_by(self, *, ce: float, coord: float) -> LossTargets:
        """Return the same targets with other denominators."""
        return replace(self, ce_denominator=ce, coord_denominator=coord)


def loss_targets(supervision: Supervision, device: torch.device | str = "cpu") -> LossTargets:
    """Return the targets of one row (or of several rows, laid out one after the other)."""
    ce_positions = np.flatnonzero(supervision.labels != IGNORED)

    def tensor(values: Any) -> torch.Tensor:
        return moved(torch.as_tensor(values), torch.device(device))

    weights = supervision.weights
    return LossTargets(
        positions=tensor(np.concatenate([ce_positions, supervision.coord_positions])),
        labels=tensor(supervision.labels[ce_positions]),
        bins=tensor(supervision.coord_targets),
        in_prefix=tensor(supervision.coord_in_prefix),
        prefix_count=int(np.count_nonzero(supervision.coord_in_prefix)),
        ce_denominator=max(len(ce_positions), 1),
        coord_denominator=max(len(supervision.coord_positions), 1),
        weights=None if weights is None else tensor(weights[ce_positions].astype(np.float32)),
    )


def window_means(micro_steps: Sequence[LossTargets], divisor: float) -> list[LossTargets]:
    """Return the targets of all micro-steps of an accumulation window, divided so that their losses make one mean.

    divisor: by which each loss is divided. Their sum is then the mean over all positions of the window in all
    learner processes, however they are spread over micro-steps (semantics, section 17). All processes must call it.
    """
    counts = sum(len(one.labels) for one in micro_steps), sum(len(one.bins) for one in micro_steps)
    ce, coord = denominators(counts)
    return [one.divided_by(ce=ce / divisor, coord=coord / divisor) for one in micro_steps]


def denominators(counts: tuple[int, int]) -> tuple[float, float]:
    """Return the denominators of this process's sums over tokens and coordinates, for means over all processes.

    counts: of this process. Gradients are averaged over processes, so these are shares of all counts. All processes
    must call it.
    """
    everywhere = gathered(counts)
    ce, coord = (sum(column) / len(everywhere) for column in zip(*everywhere, strict=True))
    return ce or 1.0, coord or 1.0


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor to the device without waiting for it to finish its work."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class LossParts:
    """The loss and its parts, scalars. `total` = ce + coord carries gradients; the others are for the log.

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

    def joined(self, coords: LossParts) -> LossParts:
        """Return the parts of a row: of its ordinary tokens (this one) and its coordinates; no gradients."""
        return replace(coords, total=self.total.detach() + coords.total.detach(), ce=self.ce, ce_count=self.ce_count)

    def figures(self) -> LossFigures:
        """Return the losses for the step's record."""
        prefix, tail = self.coord_prefix * self.coord_prefix_count, self.coord_tail * self.coord_tail_count
        values = torch.stack([self.total.detach(), self.ce, self.coord, prefix, tail])
        return LossFigures(values, self.ce_count, self.coord_prefix_count, self.coord_tail_count)


@dataclass(frozen=True)
class LossFigures:
    """The losses of a pass, or of a process's part of a whole step, for the log.

    values: the loss, its two parts (cross entropy and coordinates), and the sums over the coordinates of the prefix and
    of the tail, (5,), where they were computed. The counts are of the positions behind them.
    """

    values: torch.Tensor
    ce_count: int
    prefix_count: int
    tail_count: int

    @classmethod
    def read(cls, losses: Sequence[LossFigures]) -> list[LossFigures]:
        """Return the same with their values in main memory; the device is waited for once."""
        if not losses:
            return []
        values = torch.stack([one.values for one in losses]).cpu()
        return [replace(one, values=row.clone()) for one, row in zip(losses, values, strict=True)]


def step_losses(losses: Sequence[LossFigures]) -> dict[str, float | None]:
    """Return `loss` and `loss/*` of a step; None for a mean over nothing, and no key without a pass.

    `loss` and its parts are means over passes, for so are the gradients: a pass without coordinates adds nothing to
    that part. `loss/coord_prefix` and `loss/coord_tail` are means over such coordinates, whatever their pass.
    """
    if not losses:
        return {}
    total, ce, coord, prefix, tail = torch.stack([one.values for one in losses]).double().sum(0).tolist()
    in_prefix, in_tail = sum(one.prefix_count for one in losses), sum(one.tail_count for one in losses)
    return {
        "loss": total / len(losses),
        "loss/ce": ce / len(losses) if any(one.ce_count for one in losses) else None,
        "loss/coord": coord / len(losses) if in_prefix + in_tail else None,
        "loss/coord_prefix": share(prefix, in_prefix),
        "loss/coord_tail": share(tail, in_tail),
    }


def stage2_loss(
    logits: torch.Tensor, targets: LossTargets, coord_ids: torch.Tensor, options: RolloutMatching
) -> LossParts:
    """Return the loss from the logits (N, V) at `targets.logit_positions`.

    coord_ids: the bins' token ids, (1000,) int64. options: weights, temperature and target width of the coordinates.

    float32 (float64 for float64 logits). Finite for any logits: NaN counts as 0, and all are clamped to +-1e4.
    """
    split = len(targets.labels)
    ce = _ce_sum(logits[:split], targets.labels, targets.weights) / targets.ce_denominator
    each = coord_losses(logits[split:], targets.bins, coord_ids, options)
    coord = each.sum() / targets.coord_denominator
    return _parts(ce + coord, ce.detach(), coord.detach(), each.detach(), targets)


def stage2_loss_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: LossTargets,
    coord_ids: torch.Tensor,
    options: RolloutMatching,
    *,
    bias: torch.Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> LossParts:
    """Return the same loss from the hidden states (N, H) at `targets.logit_positions` and the output layer.

    weight (V, H), bias (V,) or None: the output layer. coord_ids, options: as in `stage2_loss`.

    At most `chunk_elements` logits exist at a time; their gradients are computed with them, so nothing is computed
    twice.
    """
    inputs = _LossInputs(
        targets, coord_ids, options, max(1, chunk_elements // weight.shape[0]), torch.is_grad_enabled()
    )
    total, ce, coord, each = _ChunkedLoss.apply(hidden, weight, bias, inputs)  # type: ignore[no-untyped-call]
    return _parts(total, ce, coord, each, targets)


def _parts(
    total: torch.Tensor, ce: torch.Tensor, coord: torch.Tensor, each: torch.Tensor, targets: LossTargets
) -> LossParts:
    # Sums under a mask: to pick the elements out would wait for the device to say how many there are.
    prefix, tail = each.where(targets.in_prefix, 0.0).sum(), each.where(~targets.in_prefix, 0.0).sum()
    tail_count = len(targets.bins) - targets.prefix_count
    return LossParts(
        total=total,
        ce=ce,
        coord=coord,
        coord_prefix=prefix / max(targets.prefix_count, 1),
        coord_tail=tail / max(tail_count, 1),
        ce_count=len(targets.labels),
        coord_prefix_count=targets.prefix_count,
        coord_tail_count=tail_count,
    )


def _usable(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits in float32 without NaN or infinities."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.nan_to_num(wide, nan=0.0).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)


def _ce_sum(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the sum of weighted cross entropies; a weight below 0 means unlikelihood, -log(1 - p) times its amount.

    Unlikelihood makes a token less probable without favouring any other (arXiv 1908.04319).
    """
    usable = _usable(logits)
    if weights is None:
        return functional.cross_entropy(usable, labels, reduction="sum")
    likelihood = functional.cross_entropy(usable, labels, reduction="none")
    others = usable.scatter(-1, labels[:, None], -torch.inf).logsumexp(dim=-1)
    unlikelihood = usable.logsumexp(dim=-1) - others
    return (torch.where(weights < 0, unlikelihood, likelihood) * weights.abs()).sum()


def soft_targets(bins: torch.Tensor, options: RolloutMatching, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return soft targets (C, 1000) around the bins (C,): Gaussians, cut off and normalised at the edges."""
    distance = torch.arange(BINS, device=bins.device)
    # A weight for each distance, in float64 and squared last: no width is so small or large that 0/0 comes out.
    weight = torch.exp(-(distance.double() / options.target_sigma).square() / 2)
    if options.target_truncate is not None:
        weight = weight.masked_fill(distance > options.target_truncate, 0.0)
    weights = weight.to(dtype)[(distance - bins[:, None]).abs()]
    return weights / weights.sum(dim=-1, keepdim=True)


def coord_losses(
    logits: torch.Tensor, bins: torch.Tensor, coord_ids: torch.Tensor, options: RolloutMatching
) -> torch.Tensor:
    """Return the loss (C,) of each coordinate: its soft cross entropy, Wasserstein-1 distance and gate, weighted.

    logits (C, V) predict the coordinates; bins (C,) int64 are the true ones; coord_ids (1000,) the bins' token ids.
    """
    scaled = _usable(logits) / max(options.temperature_coord, _LEAST_TEMPERATURE)
    coords = scaled[:, coord_ids]
    log_p = functional.log_softmax(coords, dim=-1)
    target = soft_targets(bins, options, scaled.dtype)
    soft_ce = -(target * log_p).sum(dim=-1)
    w1 = (log_p.exp() - target).cumsum(dim=-1).abs().mean(dim=-1)
    gate = (scaled.logsumexp(dim=-1) - coords.logsumexp(dim=-1)).clamp_min(0.0)
    return options.soft_ce_weight * soft_ce + options.w1_weight * w1 + options.gate_weight * gate


@dataclass(frozen=True)
class _LossInputs:
    """The constant inputs of the chunked loss."""

    targets: LossTargets
    coord_ids: torch.Tensor
    options: RolloutMatching
    chunk_rows: int
    grad_enabled: bool

    def chunks(self) -> Iterator[tuple[slice, bool]]:
        """Return slices of the N rows, none of which mixes ordinary tokens (True) and coordinates (False)."""
        split, end = len(self.targets.labels), len(self.targets.positions)
        for first, last, ordinary in ((0, split, True), (split, end, False)):
            for start in range(first, last, self.chunk_rows):
                yield slice(start, min(start + self.chunk_rows, last)), ordinary

    def losses(self, logits: torch.Tensor, rows: slice, *, ordinary: bool) -> torch.Tensor:
        """Return the sum over ordinary tokens, (), or each coordinate's loss, (rows,)."""
        if ordinary:
            weights = self.targets.weights
            return _ce_sum(logits, self.targets.labels[rows], None if weights is None else weights[rows])
        split = len(self.targets.labels)
        bins = self.targets.bins[rows.start - split : rows.stop - split]
        return coord_losses(logits, bins, self.coord_ids, self.options)


class _ChunkedLoss(torch.autograd.Function):
    """The loss with its gradients, computed chunk by chunk; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: _LossInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        ce = hidden.new_zeros((), dtype=wide)
        each = hidden.new_zeros(len(inputs.targets.bins), dtype=wide)
        needs = tuple(inputs.grad_enabled and need for need in ctx.needs_input_grad[:3])
        gradients = _Gradients(hidden, weight, bias, needs, wide)
        split = len(inputs.targets.labels)
        for rows, ordinary in inputs.chunks():
            logits = functional.linear(hidden[rows], weight, bias).detach().requires_grad_(gradients.needed)
            with torch.set_grad_enabled(gradients.needed):
                losses = inputs.losses(logits, rows, ordinary=ordinary)
                share = inputs.targets.ce_denominator if ordinary else inputs.targets.coord_denominator
                loss = losses.sum() / share
            if ordinary:
                ce += loss.detach()
            else:
                each[rows.start - split : rows.stop - split] = losses.detach()
            if gradients.needed:
                gradients.add(rows, torch.autograd.grad(loss, logits)[0])
        ctx.save_for_backward(*gradients.results())
        coord = each.sum() / inputs.targets.coord_denominator
        ctx.mark_non_differentiable(ce, coord, each)
        return ce + coord, ce, coord, each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *(None if one is None else (one * total).to(one.dtype) for one in ctx.saved_tensors), None


class _Gradients:
    """Gradients of the output layer's inputs, summed over chunks; weights and biases in at least float32."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: tuple[bool, ...],
        dtype: torch.dtype,
    ) -> None:
        self.needed = any(needs)
        self._inputs = (hidden, weight, bias)
        self._hidden = torch.zeros_like(hidden) if needs[0] else None
        self._weight = torch.zeros_like(weight, dtype=dtype) if needs[1] else None
        self._bias = torch.zeros_like(bias, dtype=dtype) if needs[2] and bias is not None else None

    def add(self, rows: slice, logits: torch.Tensor) -> None:
        """Add a chunk's part, given the gradient of its logits."""
        hidden, weight, _ = self._inputs
        if self._hidden is not None:
            self._hidden[rows] = logits @ weight
        if self._weight is not None:
            self._weight += logits.T @ hidden[rows]
        if self._bias is not None:
            self._bias += logits.sum(dim=0)

    def results(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients in the inputs' own types, None where none is needed."""
        sums = (self._hidden, self._weight, self._bias)
        return tuple(
            None if one is None or given is None else one.to(given.dtype)
            for one, given in zip(sums, self._inputs, strict=True)
        )
