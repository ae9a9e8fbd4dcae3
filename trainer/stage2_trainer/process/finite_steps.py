"""A `transformers.Trainer` whose numbers are finite: the first that is not ends the run, before it does harm.

Loss and gradients of each pass are judged where they were computed; what came of that is read once a step, after the
last gradient and before the optimizer steps. Weights are looked over when training begins, and before each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.process.non_finite import NonFiniteError
from stage2_trainer.process.ranks import gathered
from stage2_trainer.process.whole_checkpoints import WholeCheckpoints

MOST_OVERFLOWS = 40  # in a row: a scale that began at 2^16 has fallen below 2^-23, and no gradient is left of that
NAMED_SAMPLES = 40


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of an optimizer step; `loss` and `norm` are where they were computed.

    norm: the largest gradient that this pass and those before it in the step have left in this process.
    """

    name: str
    samples: tuple[str, ...]
    loss: Tensor
    norm: Tensor


class FiniteSteps(WholeCheckpoints):
    """A trainer that steps on finite gradients only, and saves finite weights only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes: list[Pass] = []
        self._overflows = 0
        self.add_callback(_FiniteStart())

    def note_pass(self, kind: str, samples: Iterable[str], loss: Tensor, apart: Sequence[Tensor] = ()) -> None:
        """Note a pass that has left its gradients: with the parameters, or `apart` from them."""
        assert self.model is not None, "it trains"
        left = [one.grad for one in self.model.parameters() if one.grad is not None]
        name = f"{kind} {len(self._passes) + 1}"
        self._passes.append(Pass(name, tuple(samples), loss.detach(), largest([*left, *apart])))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> float | None:
        """Return the norm, which `transformers` asks for before each optimizer step.

        Raises:
            NonFiniteError: it is infinite or no number, or a loss of the step is. Under float16 the scaler leaves a
                step of such gradients out and lowers its scale, which is normal: only a weight that is not finite, or
                step after step of them, ends the run.
        """
        untyped: Any = super()
        norm = untyped._get_grad_norm(model, grad_norm=grad_norm)
        passes, self._passes = self._passes, []
        losses, norms, total = self._read(passes, 0.0 if norm is None else norm)
        finite_losses = all(map(math.isfinite, losses))
        if finite_losses and math.isfinite(total):
            self._overflows = 0
        elif not (finite_losses and self._is_overflow()):
            raise self._fault(passes, losses, norms, total)
        return None if norm is None else total

    def _read(self, passes: Sequence[Pass], norm: Tensor | float) -> tuple[list[float], list[float], float]:
        """Bring everything over at once: to read one number means to wait for the device."""
        device = self.args.device
        told = [*(one.loss for one in passes), *(one.norm for one in passes), torch.as_tensor(norm)]
        together = torch.stack([one.detach().to(device, torch.float32).reshape(()) for one in told])
        numbers: list[float] = together.tolist()
        return numbers[: len(passes)], numbers[len(passes) : -1], numbers[-1]

    def _is_overflow(self) -> bool:
        """Whether gradients that are not finite are a scaler's to deal with. All processes must call it."""
        self._overflows += 1
        return bool(self.args.fp16) and self._overflows < MOST_OVERFLOWS and self._broken_weight() is None

    def _broken_weight(self) -> str | None:
        assert self.model is not None, "it trains"
        return broken_weight(self.model, trained_only=True)

    def _fault(
        self, passes: Sequence[Pass], losses: Sequence[float], norms: Sequence[float], total: float
    ) -> NonFiniteError:
        own = _first_fault(passes, losses, norms, total)
        reduced = not math.isfinite(total)  # over the processes: all of them are here
        everywhere = gathered(own) if reduced else [own]
        earliest = min(place for place, _ in everywhere)
        told = "; ".join(dict.fromkeys(text for place, text in everywhere if place == earliest))
        weight = self._broken_weight() if reduced else None
        named = f"; the weight {weight} is not finite" if weight else ""
        return NonFiniteError(
            f"step {self.state.global_step + 1}: {told}{named}. Nothing of it is saved, and the next start goes on from"
            " the last checkpoint. Where the same step ends so again, look at these samples, or lower"
            " training.learning_rate"
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save finite weights.

        Raises:
            NonFiniteError: a weight is not finite; nothing was written.
        """
        if weight := self._broken_weight():
            raise NonFiniteError(
                f"step {self.state.global_step}: the weight {weight} is not finite, so no checkpoint is saved, and the"
                " next start goes on from the last one. Where it ends so again, lower training.learning_rate"
            )
        super()._save_checkpoint(model, trial)


class _FiniteStart(TrainerCallback):
    """A callback that looks over the weights with which training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise ConfigError for a weight that is not finite."""
        model = kwargs["model"]
        weight = broken_weight(model)
        if weight is None:
            return
        rule = f"the weight {weight} is not finite, nor would anything be that is trained from it"
        if state.global_step:
            folder = f"checkpoint of step {state.global_step}"
            way_out = "remove this checkpoint, and the next start goes on from an older one"
            raise ConfigError([Problem("training.resume_from_checkpoint", folder, rule, way_out)])
        way_out = "train from a checkpoint of the first stage that is whole"
        raise ConfigError([Problem("model.model", model.config.name_or_path, rule, way_out)])


def broken_weight(model: nn.Module, *, trained_only: bool = False) -> str | None:
    """Return the name of a weight with a value that is not finite, the first; None where all are finite.

    Where ZeRO-3 has spread them, each process looks at its part. All processes must call it.
    """
    weights = {
        name: getattr(one, "ds_tensor", one).detach()
        for name, one in model.named_parameters()
        if one.is_floating_point() and (one.requires_grad or not trained_only)
    }
    own = None
    if not math.isfinite(float(largest(list(weights.values())))):
        own = next(name for name, one in weights.items() if not bool(one.isfinite().all()))
    return next(iter(gathered(own)), None)


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value, where it was computed; no number where there is one that is none."""
    return torch.nn.utils.get_total_norm([one.detach() for one in tensors if one.numel()], norm_type=math.inf)


def _first_fault(
    passes: Sequence[Pass], losses: Sequence[float], norms: Sequence[float], total: float
) -> tuple[int, str]:
    """Return the place of the first pass that is at fault, or the number of passes, and what is said of it."""
    for place, (one, loss, norm) in enumerate(zip(passes, losses, norms, strict=True)):
        if not math.isfinite(loss):
            return place, f"the loss of {one.name} is {loss} ({_names([one])})"
        if not math.isfinite(norm):
            return place, f"the gradient norm is {total} from {one.name} on ({_names([one])})"
    return len(passes), f"the gradient norm is {total} ({_names(passes)})"


def _names(passes: Sequence[Pass]) -> str:
    samples = list(dict.fromkeys(sample for one in passes for sample in one.samples))
    more = f" and {len(samples) - NAMED_SAMPLES} more" if len(samples) > NAMED_SAMPLES else ""
    return f"samples {', '.join(samples[:NAMED_SAMPLES])}{more}"
