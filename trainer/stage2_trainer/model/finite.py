"""Finite numbers: a run ends at the first loss, gradient or weight that is not finite, before it does harm.

Losses and gradients stay where they were computed and are read once a step, before the optimizer steps. Weights are
checked when training begins and before each checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stage2_api.errors import refused
from stage2_trainer.model.checkpoints import NonFiniteError
from stage2_trainer.process.ranks import gathered

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


class FiniteGuard:
    """Lets a run step on finite gradients only, and save finite weights only.

    policy: the model that trains. scaled: whether a loss scaler (float16) skips steps whose gradients overflow.
    """

    def __init__(self, policy: nn.Module, device: torch.device, *, scaled: bool) -> None:
        self._policy = policy
        self._device = device
        self._scaled = scaled
        self._passes: list[Pass] = []
        self._overflows = 0

    def note(self, kind: str, samples: Iterable[str], loss: Tensor, apart: Sequence[Tensor] = ()) -> None:
        """Record a finished pass, whose gradients are with the parameters or `apart` from them."""
        gradients = [one.grad for one in self._policy.parameters() if one.grad is not None]
        name = f"{kind} {len(self._passes) + 1}"
        self._passes.append(Pass(name, tuple(samples), loss.detach(), largest([*gradients, *apart])))

    def check(self, norm: Tensor | float, *, step: int) -> float:
        """Return the gradient norm of a step, whose number counts from 1, before the optimizer steps.

        Raises:
            NonFiniteError: it is infinite or NaN, or a loss of the step is. Under float16 the scaler normally skips
                such a step and lowers its scale: then only a weight that is not finite, or many such steps in a row,
                end the run.
        """
        passes, self._passes = self._passes, []
        losses, norms, total = self._read(passes, norm)
        finite_losses = all(map(math.isfinite, losses))
        if finite_losses and math.isfinite(total):
            self._overflows = 0
        elif not (finite_losses and self._is_overflow()):
            raise self._fault(passes, losses, norms, total, step)
        return total

    def check_start(self, *, step: int) -> None:
        """Raise ConfigError for a weight that is not finite in the model with which training begins, after `step`."""
        weight = broken_weight(self._policy)
        if weight is None:
            return
        rule = f"the weight {weight} is not finite, and nothing trained from it would be"
        if step:
            way_out = "remove this checkpoint, and the next start resumes from an older one"
            raise refused("training.resume_from_checkpoint", f"checkpoint of step {step}", rule, way_out)
        config: object = getattr(self._policy, "config", None)
        model = getattr(config, "name_or_path", "")
        raise refused("model.model", model, rule, "start from an intact checkpoint of stage 1")

    def check_weights(self, *, step: int) -> None:
        """Raise NonFiniteError for a weight that is not finite, before the weights after `step` are saved."""
        if weight := broken_weight(self._policy, trained_only=True):
            raise NonFiniteError(
                f"step {step}: the weight {weight} is not finite, so no checkpoint is saved, and the next start"
                " resumes from the last one. If it happens again, lower training.learning_rate"
            )

    def _read(self, passes: Sequence[Pass], norm: Tensor | float) -> tuple[list[float], list[float], float]:
        """Copy all numbers to the host at once, since each read waits for the device."""
        scalars = [*(one.loss for one in passes), *(one.norm for one in passes), torch.as_tensor(norm)]
        together = torch.stack([one.detach().to(self._device, torch.float32).reshape(()) for one in scalars])
        numbers: list[float] = together.tolist()
        return numbers[: len(passes)], numbers[len(passes) : -1], numbers[-1]

    def _is_overflow(self) -> bool:
        """Whether the loss scaler handles these gradients. All processes must call it."""
        self._overflows += 1
        few = self._scaled and self._overflows < MOST_OVERFLOWS
        return few and broken_weight(self._policy, trained_only=True) is None

    def _fault(
        self, passes: Sequence[Pass], losses: Sequence[float], norms: Sequence[float], total: float, step: int
    ) -> NonFiniteError:
        own = _first_fault(passes, losses, norms, total)
        reduced = not math.isfinite(total)  # over the processes: all of them are here
        everywhere = gathered(own) if reduced else [own]
        earliest = min(place for place, _ in everywhere)
        faults = "; ".join(dict.fromkeys(text for place, text in everywhere if place == earliest))
        weight = broken_weight(self._policy, trained_only=True) if reduced else None
        named = f"; the weight {weight} is not finite" if weight else ""
        return NonFiniteError(
            f"step {step}: {faults}{named}. Nothing of it is saved, and the next start resumes from the last"
            " checkpoint. If the same step fails again, look at these samples, or lower training.learning_rate"
        )


def broken_weight(model: nn.Module, *, trained_only: bool = False) -> str | None:
    """Return the name of the first weight with a value that is not finite; None if all are finite.

    With ZeRO-3 each process checks its part. All processes must call it.
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
    """Return the largest absolute value, on its device; NaN if any value is NaN."""
    return torch.nn.utils.get_total_norm([one.detach() for one in tensors if one.numel()], norm_type=math.inf)


def _first_fault(
    passes: Sequence[Pass], losses: Sequence[float], norms: Sequence[float], total: float
) -> tuple[int, str]:
    """Return the index of the first faulty pass, or the number of passes, and a description of the fault."""
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
