"""The checkpoints of a run: written whole or not at all, the oldest removed, the best and the proved kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerState
from transformers.trainer_utils import sort_checkpoints

from stage2_trainer.model.checkpoints import (
    PREFIX,
    STATE,
    UNFINISHED,
    checkpoint_errors,
    create_staging,
    flaw_of,
    publish,
    set_aside_after,
    step_of,
    write_course,
)
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.ranks import gathered, rank
from stage2_trainer.sync.fleet.report import ProvedStep

Write = Callable[[Path], None]
"""Writes this process's part of a checkpoint into a folder."""


class Records(Protocol):
    """Something that a run writes beside its checkpoints: its log, its rollouts."""

    def flush(self) -> None:
        """Return once everything written is on disk. Raises OSError."""
        ...


class Checkpoints:
    """The checkpoints of a run in its output folder.

    limit: how many are kept; None: all. course: what the run depends on (`checkpoints.run_course`); each checkpoint
    records it. records: what this process writes; it is on disk before a checkpoint gets its name, and never lags
    behind it. proved: the newest step that this start proved. earlier_proof: the newest that earlier starts proved, as
    the checkpoint resumed from has it; None: none is known.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit: int | None,
        course: Mapping[str, Any],
        records: Sequence[Records],
        proved: ProvedStep,
        earlier_proof: int | None = None,
    ) -> None:
        self._folder = folder
        self._limit = limit
        self._course = course
        self._records = records
        self._proved = proved
        self._earlier_proof = earlier_proof

    def save(self, state: TrainerState, write: Write) -> None:
        """Stage a checkpoint with what `write` writes, publish it, and remove the oldest. All processes must call it.

        Raises:
            CheckpointError: it could not be written: the disk is full, say. Earlier checkpoints are untouched.
        """
        folder, step = self._folder, state.global_step
        staged = folder / UNFINISHED / f"{PREFIX}{step}"
        with ACTIVITY.doing(f"saving {PREFIX}{step}"), checkpoint_errors(folder):
            if rank() == 0:
                create_staging(folder)
            gathered(step)  # a barrier
            write(staged)
            for one in self._records:
                one.flush()
            gathered(step)  # a barrier
            if state.best_global_step == step:
                state.best_model_checkpoint = str(folder / staged.name)
            if rank() == 0:
                state.save_to_json(str(staged / STATE))
                write_course(self._course, staged)
                publish(staged, folder, proved_step=self._proved_step)
        if rank() == 0:
            self._remove_oldest(folder / staged.name, state.best_model_checkpoint)
        gathered(step)  # a barrier

    def is_missing(self, step: int) -> bool:
        """Whether the first process, which publishes, finds no whole checkpoint of a step. All must call it."""
        return gathered(flaw_of(self._folder / f"{PREFIX}{step}") is not None)[0]

    def set_unproved_aside(self, began: int) -> None:
        """Rename what was saved since the last proof: a server that is known to be wrong now may have been so then.

        began: the step at which this start began; it counts where no proof is known.
        """
        if rank() == 0:
            proved = self._proved_step
            set_aside_after(began if proved is None else proved, self._folder)

    @property
    def _proved_step(self) -> int | None:
        """The newest step whose weights were proved to answer, by this start or an earlier one; None: none is known."""
        return self._earlier_proof if self._proved.step is None else self._proved.step

    def _remove_oldest(self, saved: Path, best: str | None) -> None:
        """Remove the oldest checkpoints beyond the limit.

        The one just saved stays, even if the machine's clock says that it is the oldest; so do the best, and the newest
        that a proof vouches for: later ones may turn out to be worthless.
        """
        if not self._limit or self._limit < 0:
            return
        found = sort_checkpoints(str(self._folder), use_mtime=True)
        limit = -1 if self._proved_step is None else self._proved_step
        proved = [one for one in found if step_of(Path(one)) <= limit]
        keep = {str(saved), best, max(proved, key=lambda one: step_of(Path(one)), default=None)} & set(found)
        surplus = len(found) - max(self._limit, len(keep))
        for removed in [one for one in found if one not in keep][: max(0, surplus)]:
            shutil.rmtree(removed, ignore_errors=True)
