"""Checkpoints that proofs of syncs vouch for: one is never removed, and what is newer is set aside if need be.

A contradiction at a start's first sync tells of the starts before it as well, whose servers may have been the same. So
the newest proved step is written beside the checkpoints, and read by the next start.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from stage2_trainer.process.checkpoints import MARK, PREFIX, UNPROVED, checkpoints_of, flush, step_of
from stage2_trainer.sync.fleet.proved_step import ProvedStep

logger = logging.getLogger(__name__)


class VouchedCheckpoints(TrainerCallback):
    """The checkpoints of an output folder, by what proofs say of them.

    proved: what proofs of this start have shown. lasting: whether syncs are proved again and again; else the mark would
    lie far back, and one contradiction would cost all that was trained since. named: the checkpoint that a person wants
    to go on from; it stays.
    """

    def __init__(self, folder: Path) -> None:
        self.proved = ProvedStep()
        self.lasting = False
        self.named: Path | None = None
        self._folder = folder
        self._began = 0
        self._saved: list[int] = []  # steps of the checkpoints that this start has written
        self._earlier: int | None = None  # the newest step that a start before this one proved
        self._marked: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step from which training goes on, and what earlier starts have proved up to it."""
        self._began = state.global_step
        if not args.should_save:
            return
        found = _read(self._folder / MARK) if self.lasting and not self._is_from_elsewhere() else None
        self._earlier = None if found is None else min(found, self._began)
        if self._earlier is None:
            (self._folder / MARK).unlink(missing_ok=True)
        else:
            self._mark(self._earlier)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the newest proved step to the next start."""
        if args.should_save and self.lasting and self.proved.step is not None:
            self._mark(self.proved.step)

    def saved(self, step: int) -> None:
        """Note a checkpoint of this start."""
        self._saved.append(step)

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that proofs vouch for, whether it is still there or not."""
        steps = [self._began, *self._saved, *([] if self._earlier is None else [self._earlier])]
        vouched = max(filter(self._is_proved, steps), default=None)
        return None if vouched is None else self._folder / f"{PREFIX}{vouched}"

    def set_others_aside(self) -> None:
        """Rename what was saved since the last proof: a server that is now known to be wrong may have been so then.

        The next start goes on from the newest checkpoint that keeps its name.
        """
        for checkpoint in self._doubted():
            aside = self._folder / f"{UNPROVED}{checkpoint.name}"
            shutil.rmtree(aside, ignore_errors=True)
            checkpoint.rename(aside)
            logger.error("%s was saved since the last proof: it is %s now", checkpoint.name, aside)
        flush(self._folder)

    def _doubted(self) -> list[Path]:
        """Return what is newer than the last proof; where none is known of, what this start has saved."""
        of_all = self.lasting and self._newest_proved() is not None
        found = [(step_of(one), one) for one in checkpoints_of(self._folder) if not self._is_named(one)]
        return [one for step, one in found if (of_all or step in self._saved) and not self._is_proved(step)]

    def _is_named(self, checkpoint: Path) -> bool:
        return self.named is not None and checkpoint.resolve() == self.named.resolve()

    def _is_from_elsewhere(self) -> bool:
        return self.named is not None and self.named.resolve().parent != self._folder.resolve()

    def _newest_proved(self) -> int | None:
        return self._earlier if self.proved.step is None else self.proved.step

    def _is_proved(self, step: int) -> bool:
        newest = self._newest_proved()
        return newest is not None and step <= newest

    def _mark(self, step: int) -> None:
        if step == self._marked:
            return
        written = self._folder / f".{MARK}"
        with written.open("w", encoding="utf-8") as file:
            json.dump({"step": step}, file)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self._folder / MARK)
        self._marked = step


def _read(mark: Path) -> int | None:
    """Return the step that a mark names; None where there is none, or it cannot be read, which is said."""
    try:
        step = json.loads(mark.read_text(encoding="utf-8"))["step"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is passed over: %s: %s", mark, type(error).__name__, error)
        return None
    if type(step) is int and step >= 0:
        return step
    logger.warning("%s is passed over: %r is no step", mark, step)
    return None
