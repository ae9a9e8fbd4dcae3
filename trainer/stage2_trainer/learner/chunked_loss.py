"""The loss from hidden states in portions of logits, each with its gradients, so that nothing is computed twice.

Memory grows with the supervised positions alone, and not with positions x vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stage2_trainer.learner.loss_targets import LossOptions, LossTargets
from stage2_trainer.learner.loss_terms import ce_sum, coord_losses


@dataclass(frozen=True)
class LossInputs:
    """The constant inputs of the chunked loss."""

    targets: LossTargets
    coord_ids: torch.Tensor
    options: LossOptions
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
            return ce_sum(logits, self.targets.labels[rows])
        split = len(self.targets.labels)
        bins = self.targets.bins[rows.start - split : rows.stop - split]
        return coord_losses(logits, bins, self.coord_ids, self.options)


class ChunkedLoss(torch.autograd.Function):
    """The loss with its gradients, computed chunk by chunk; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, inputs: LossInputs
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
