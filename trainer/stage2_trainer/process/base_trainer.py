"""The base of every trainer here: a `transformers.Trainer` with whole checkpoints and finite numbers.

`WholeCheckpoints` stages each checkpoint and renames it when every process has written its part
(`process.checkpoints`). `FiniteSteps` ends the run at the first loss, gradient or weight that is not finite, before it
does harm: losses and gradients stay where they were computed and are read once a step, before the optimizer steps;
weights are checked when training begins and before each checkpoint.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.trainer_utils import sort_checkpoints

from stage2_api.errors import refused
from stage2_trainer.activity import ACTIVITY, Doing
from stage2_trainer.process.checkpoints import (
    PREFIX,
    STATE,
    UNFINISHED,
    NonFiniteError,
    checkpoint_errors,
    create_staging,
    flaw_of,
    publish,
    set_aside_after,
    step_of,
    write_course,
)
from stage2_trainer.process.policy import split_learning_rates
from stage2_trainer.process.ranks import gathered
from stage2_trainer.sync.fleet.report import ProvedStep

logger = logging.getLogger(__name__)

MOST_OVERFLOWS = 40  # in a row: a scale that began at 2^16 has fallen below 2^-23, and no gradient is left of that
NAMED_SAMPLES = 40


class Records(Protocol):
    """Something that a run writes beside its checkpoints: its log, its rollouts."""

    def flush(self) -> None:
        """Return once everything written is on disk. Raises OSError."""
        ...


class _StepBoundary(TrainerCallback):
    """Tracks whether an optimizer step is half done, and at which step training began."""

    within = False
    began = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step at which training resumes."""
        self.began = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights begin to change."""
        self.within = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights, optimizer, schedule and step count belong to one step again."""
        self.within = False


class StartLogger(TrainerCallback):
    """Logs `start` when training begins: the step at which it resumes, and how many there are in all."""

    def __init__(self, write: Callable[[str, Mapping[str, Any]], None]) -> None:
        self._write = write

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log it."""
        self._write("start", {"step": state.global_step, "max_steps": state.max_steps})


class StepNames(TrainerCallback):
    """Names the step that is under way, in place of what came before."""

    def __init__(self, doing: Doing) -> None:
        self._doing = doing

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the step that begins."""
        self._doing.restart(f"step {state.global_step + 1} of {state.max_steps}")


def evaluation_name(step: int) -> str:
    """Return how the evaluation after so many steps is called.

    >>> evaluation_name(0), evaluation_name(1200)
    ('first evaluation, before training', 'evaluation at step 1,200')
    """
    return f"evaluation at step {step:,}" if step else "first evaluation, before training"


class WholeCheckpoints(Trainer):
    """A trainer that stages a checkpoint, and names it when all processes have written their part."""

    course: Mapping[str, Any] = MappingProxyType({})
    """What the run depends on (`checkpoints.run_course`); each checkpoint records it."""
    records: Sequence[Records] = ()
    """What this process writes; it is on disk before a checkpoint gets its name, and never lags behind it."""
    earlier_proof: int | None = None
    """The newest step that earlier starts proved, as the checkpoint resumed from has it; None: none is known."""
    part_rates: Mapping[str, float] = MappingProxyType({})
    """Learning rates of the model's parts (llm, vit, aligner) that have their own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # transformers would remove the last checkpoint at the end, where one is kept and another was the best
        self._most_kept, self.args.save_total_limit = self.args.save_total_limit, None
        self.proved = ProvedStep()
        self._aside: Path | None = None
        self._boundary = _StepBoundary()
        self.add_callback(self._boundary)
        self.remove_callback(PrinterCallback)  # the run's log has the figures

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer; some parts of the model may have learning rates of their own."""
        assert self.model is not None, "it trains"
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        split_learning_rates(optimizer, self.model, self.part_rates)
        return optimizer

    def save_beside(self, checkpoint: Path) -> None:
        """Write what else belongs into the checkpoint's folder; each process its own."""

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step of this start, unless it is on disk already.

        Nothing is written in the middle of a step, when some weights have changed and others have not.
        """
        if self._boundary.within:
            logger.warning("the optimizer was in the middle of a step: what it has changed is not saved")
            return
        step = self.state.global_step
        if step <= self._boundary.began:
            return  # one process may have left alone, and asks no other
        missing = flaw_of(self._folder / f"{PREFIX}{step}") is not None
        if gathered(missing)[0]:  # the first process, which publishes, knows
            assert self.model is not None, "it trains"
            self._save_checkpoint(self.model, trial=None)

    def set_unproved_aside(self) -> None:
        """Rename what was saved since the last proof: a server that is known to be wrong now may have been so then."""
        if self.args.should_save:
            proved = self._proved_step
            set_aside_after(self._boundary.began if proved is None else proved, self._folder)

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward pass changes weights: DeepSpeed's engine steps at the end of a window's last one."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def _proved_step(self) -> int | None:
        """The newest step whose weights were proved to answer, by this start or an earlier one; None: none is known."""
        return self.earlier_proof if self.proved.step is None else self.proved.step

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write, publish, and remove the oldest.

        Raises:
            CheckpointError: it could not be written: the disk is full, say. Earlier checkpoints are untouched.
        """
        folder, step = self._folder, self.state.global_step
        staged = folder / UNFINISHED / f"{PREFIX}{step}"
        with ACTIVITY.doing(f"saving {PREFIX}{step}"), checkpoint_errors(folder):
            if self.args.should_save:
                create_staging(folder)
            gathered(step)  # a barrier
            self._write_aside(model, trial, staged)
            gathered(step)  # a barrier
            if self.args.should_save:
                self.state.save_to_json(str(staged / STATE))  # again: it names the best checkpoint
                write_course(self.course, staged)
                publish(staged, folder, proved_step=self._proved_step)
        if self.args.should_save:
            self._remove_oldest(folder / staged.name, self.state.best_model_checkpoint)
        gathered(step)  # a barrier

    def _write_aside(self, model: nn.Module, trial: Any, staged: Path) -> None:
        self._aside = staged.parent
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._aside = None
        self.save_beside(staged)
        for one in self.records:
            one.flush()
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(self._folder / staged.name)

    def _remove_oldest(self, saved: Path, best: str | None) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`.

        The one just saved stays, even if the machine's clock says that it is the oldest; so do the best, and the newest
        that a proof vouches for: later ones may turn out to be worthless.
        """
        if not self._most_kept or self._most_kept < 0:
            return
        found = sort_checkpoints(str(self._folder), use_mtime=True)
        limit = -1 if self._proved_step is None else self._proved_step
        proved = [one for one in found if step_of(Path(one)) <= limit]
        keep = {str(saved), best, max(proved, key=lambda one: step_of(Path(one)), default=None)} & set(found)
        surplus = len(found) - max(self._most_kept, len(keep))
        for removed in [one for one in found if one not in keep][: max(0, surplus)]:
            shutil.rmtree(removed, ignore_errors=True)


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
        """Record a pass whose gradients are there: in the parameters, or `apart` from them."""
        assert self.model is not None, "it trains"
        left = [one.grad for one in self.model.parameters() if one.grad is not None]
        name = f"{kind} {len(self._passes) + 1}"
        self._passes.append(Pass(name, tuple(samples), loss.detach(), largest([*left, *apart])))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> float | None:
        """Return the norm, which `transformers` asks for before each optimizer step.

        Raises:
            NonFiniteError: it is infinite or NaN, or a loss of the step is. Under float16 the scaler normally skips
                such a step and lowers its scale: then only a weight that is not finite, or many such steps in a row,
                end the run.
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
        """Copy all numbers to the host at once, since each read waits for the device."""
        device = self.args.device
        scalars = [*(one.loss for one in passes), *(one.norm for one in passes), torch.as_tensor(norm)]
        together = torch.stack([one.detach().to(device, torch.float32).reshape(()) for one in scalars])
        numbers: list[float] = together.tolist()
        return numbers[: len(passes)], numbers[len(passes) : -1], numbers[-1]

    def _is_overflow(self) -> bool:
        """Whether the loss scaler handles these gradients. All processes must call it."""
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
        faults = "; ".join(dict.fromkeys(text for place, text in everywhere if place == earliest))
        weight = self._broken_weight() if reduced else None
        named = f"; the weight {weight} is not finite" if weight else ""
        return NonFiniteError(
            f"step {self.state.global_step + 1}: {faults}{named}. Nothing of it is saved, and the next start resumes"
            " from the last checkpoint. If the same step fails again, look at these samples, or lower"
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
                " next start resumes from the last one. If it happens again, lower training.learning_rate"
            )
        super()._save_checkpoint(model, trial)


class _FiniteStart(TrainerCallback):
    """Checks the weights with which training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise ConfigError for a weight that is not finite."""
        model = kwargs["model"]
        weight = broken_weight(model)
        if weight is None:
            return
        rule = f"the weight {weight} is not finite, and nothing trained from it would be"
        if state.global_step:
            folder = f"checkpoint of step {state.global_step}"
            way_out = "remove this checkpoint, and the next start resumes from an older one"
            raise refused("training.resume_from_checkpoint", folder, rule, way_out)
        way_out = "start from an intact checkpoint of stage 1"
        raise refused("model.model", model.config.name_or_path, rule, way_out)


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
