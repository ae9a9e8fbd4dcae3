"""A `transformers.Trainer` whose checkpoints are whole or not there (`process.checkpoints`), for all our trainers."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import sort_checkpoints

from stage2_trainer.process.checkpoints import (
    PREFIX,
    ROOM_TO_SPARE,
    STATE,
    UNFINISHED,
    CheckpointError,
    flaw_of,
    publish,
    size_of_newest,
    staging,
    told_when_unwritten,
    warn_if_short,
)
from stage2_trainer.process.ranks import gathered
from stage2_trainer.process.run_course import write_course
from stage2_trainer.process.save_behind import SaveBehind
from stage2_trainer.process.vouched_checkpoints import VouchedCheckpoints
from stage2_trainer.process.writing import writing

logger = logging.getLogger(__name__)

ROOM_FOR_THE_FIRST = 1.5  # of what its tensors take: DeepSpeed keeps copies
MOMENTS_BYTES = 8  # that AdamW keeps of a parameter


class _StepBoundary(TrainerCallback):
    """A callback that knows whether an optimizer step is half done, and with which step training began."""

    within = False
    began = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step from which training goes on."""
        self.began = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights begin to change."""
        self.within = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that weights, optimizer, schedule and the count of steps are of one step again."""
        self.within = False


class Records(Protocol):
    """What a run writes down beside its checkpoints: its log, its rollouts."""

    def flush(self) -> None:
        """Return once all that was written is on disk. Raises OSError."""
        ...


class WholeCheckpoints(Trainer):
    """A trainer that writes a checkpoint aside and names it when all processes have written their part."""

    course: Mapping[str, Any] = MappingProxyType({})
    """What the run is made of (`process.run_course`); each checkpoint says it."""
    async_save = False
    """Whether training goes on while a checkpoint is written to disk (`process.save_behind`)."""
    records: Sequence[Records] = ()
    """What this process has written down; it is on disk before a checkpoint gets its name, and never lags behind it."""
    _aside: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # transformers would remove the last checkpoint at the end, where one is kept and another was the best
        self._most_kept, self.args.save_total_limit = self.args.save_total_limit, None
        self.vouched = VouchedCheckpoints(self._folder)
        self._boundary = _StepBoundary()
        self.add_callback(self._boundary)
        self.add_callback(self.vouched)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and return once the last checkpoint is on disk, however training ended.

        Raises:
            CheckpointError: it could not be written, and nothing else went wrong.
        """
        if self.args.should_save:
            self._behind.forget()
        try:
            done = super().train(*args, **kwargs)
        except BaseException:
            try:
                self._behind.settle()
            except Exception as error:  # noqa: BLE001 - what ended the run is told by what is raised
                logger.error("%s", error)
            raise
        else:
            self._behind.settle()
        finally:
            if self.args.should_save:
                self._behind.forget()
        return done

    def save_beside(self, checkpoint: Path) -> None:
        """Write what else belongs into the checkpoint's folder; each process its own."""

    def save_progress(self) -> None:
        """Write a checkpoint of the last whole optimizer step, if this start has made one that is not on disk yet.

        Nothing is written in the middle of a step, where some weights have changed and others have not.
        """
        if self._boundary.within:
            logger.warning("the optimizer was in the middle of a step: what it has changed is not saved")
            return
        step = self.state.global_step
        if step <= self._boundary.began:
            return  # one process may have left alone, and asks no other
        self._behind.settle()
        missing = flaw_of(self._folder / f"{PREFIX}{step}") is not None
        if gathered(missing)[0]:  # the first process, which publishes, knows
            assert self.model is not None, "it trains"
            self.async_save = False  # it is waited for
            self._save_checkpoint(self.model, trial=None)

    def set_unproved_aside(self) -> None:
        """Rename what was saved since the last proof (`VouchedCheckpoints`)."""
        if self.args.should_save:
            self.vouched.set_others_aside()

    @property
    def steps_in_backward(self) -> bool:
        """Whether the backward pass changes weights: DeepSpeed's engine steps at the end of a window's last one."""
        return bool(self.accelerator.distributed_type == DistributedType.DEEPSPEED)

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._aside) if self._aside is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write, publish, and remove the oldest.

        Raises:
            CheckpointError: it could not be written: the disk is full, say. Earlier checkpoints are untouched.
        """
        self._behind.settle()  # of the one before, so that what is there is complete
        folder, step = self._folder, self.state.global_step
        memory = self._memory()
        staged = (memory or folder / UNFINISHED) / f"{PREFIX}{step}"
        with told_when_unwritten(folder, memory):
            if self.args.should_save:
                warn_if_short(folder)
                if memory is None:
                    staging(folder)
            gathered(step)  # a barrier
            self._write_aside(model, trial, staged)
            gathered(step)  # a barrier
            if self.args.should_save:
                with writing():  # from here on it asks no other process: it is whole, though they fail
                    self.state.save_to_json(str(staged / STATE))  # again: it names the best checkpoint
                    write_course(self.course, staged)
                    if memory is None:
                        publish(staged, folder)
        if self.args.should_save:
            self.vouched.saved(step)
            rotate = partial(self._remove_oldest, self.state.best_model_checkpoint)
            if memory is None:
                rotate()
            else:
                self._behind.hand_over(staged, then=rotate)
        gathered(step)  # a barrier

    def _remove_oldest(self, best: str | None) -> None:
        """Remove the oldest checkpoints beyond `save_total_limit`.

        The newest stays, the best, and the newest that proofs vouch for: later ones may turn out to be worth nothing.
        """
        if not self._most_kept or self._most_kept < 0:
            return
        found = sort_checkpoints(str(self._folder), use_mtime=True)
        stay = {found[-1], best, str(self.vouched.newest)} & set(found)
        surplus = len(found) - max(self._most_kept, len(stay))
        for removed in [one for one in found if one not in stay][: max(0, surplus)]:
            shutil.rmtree(removed, ignore_errors=True)

    def _memory(self) -> Path | None:
        """Return the folder in memory into which all processes write; None where they write to disk."""
        found = ""
        if self.async_save and self.args.should_save and self._behind.has_room(self._room()):
            found = str(self._behind.begin())
        first = gathered(found)[0] if self.async_save else ""
        return Path(first) if first else None

    def _room(self) -> float:
        """Return the bytes that a checkpoint may take, by the last one or by what it will hold."""
        if last := size_of_newest(self._folder):
            return last * ROOM_TO_SPARE
        assert self.model is not None, "it trains"
        adapted = hasattr(self.model, "peft_config")  # its base is not saved
        trained = weights = 0
        for one in self.model.parameters():
            count = getattr(one, "ds_numel", one.numel())  # ZeRO-3 leaves an empty tensor
            trained += count if one.requires_grad else 0
            weights += 0 if adapted and not one.requires_grad else count * one.element_size()
        return ROOM_FOR_THE_FIRST * (weights + MOMENTS_BYTES * trained)

    @cached_property
    def _behind(self) -> SaveBehind:
        return SaveBehind(self._folder)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Tell of a checkpoint that could not be written behind, before anything follows.

        Raises:
            CheckpointError: see `SaveBehind.check`.
        """
        self._behind.check()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _load_best_model(self) -> None:
        failed = ""
        try:
            self._behind.settle()
        except CheckpointError as error:
            failed = str(error)
        if failed := gathered(failed)[0]:  # the others wait for the first process, which writes
            raise CheckpointError(failed)
        super()._load_best_model()

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
