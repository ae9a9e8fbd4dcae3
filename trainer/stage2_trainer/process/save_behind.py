"""A checkpoint that is written behind training (`training.async_save`): into memory first, to disk by a thread.

Whoever writes a checkpoint writes files: transformers, peft, safetensors, DeepSpeed. They get a folder in shared memory
(tmpfs), and training waits for that alone; a thread takes it to where a save that is waited for writes, and publishes
it the same way. The bytes are the same, and nothing of it changes while training goes on. At most one is on its way.
(torch.distributed.checkpoint's `async_save` and Megatron's `--async-save` copy tensors to the host instead, and need
writers of their own.)
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path

from stage2_trainer.process.checkpoints import publish, staging, told_when_unwritten
from stage2_trainer.process.host_memory import SHARED_MEMORY, memory_left, shared_memory_left
from stage2_trainer.process.writing import writing

logger = logging.getLogger(__name__)

NAME = "stage2-save"


class SaveBehind:
    """The saves of one output folder that are written behind training, one at a time. Of the first process alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # named by the run: a learner that was killed leaves its folder, and the next start of the run removes it
        self._prefix = f"{NAME}-{hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]}-"
        self._writing: Future[None] | None = None

    def has_room(self, nbytes: float) -> bool:
        """Whether memory has room for a checkpoint of so many bytes; where it has none, that is said."""
        free = min(shared_memory_left(), memory_left())
        if free < nbytes:
            logger.warning(
                "training.async_save: %s and the memory of this host have room for %.2f GB, and a checkpoint takes"
                " %.2f GB: training waits until it is on disk. Raise the memory limit and the size of %s",
                SHARED_MEMORY,
                free / 1e9,
                nbytes / 1e9,
                SHARED_MEMORY,
            )
        return free >= nbytes

    def begin(self) -> Path:
        """Return a new folder in memory; what a killed learner of this run left there is removed."""
        self.forget()
        return Path(tempfile.mkdtemp(prefix=self._prefix, dir=SHARED_MEMORY))

    def hand_over(self, staged: Path, then: Callable[[], None]) -> None:
        """Have a checkpoint in such a folder written to disk and published, and something done after that."""
        assert self._writing is None, "settle() waits for the one before"
        self._writing = self._thread.submit(self._write, staged, then)

    def check(self) -> None:
        """Raise CheckpointError if the last one could not be written."""
        if self._writing is not None and self._writing.done():
            self.settle()

    def settle(self) -> None:
        """Wait until nothing is on its way. Raises CheckpointError as `check`."""
        if self._writing is not None:
            wait([self._writing])  # until it has ended it is on its way, also for whom Ctrl-C calls from here
            writing, self._writing = self._writing, None
            writing.result()

    def forget(self) -> None:
        """Remove what this run has in memory, unless it is on its way."""
        if self._writing is not None:
            return
        for left in SHARED_MEMORY.glob(f"{self._prefix}*"):
            if not left.is_symlink() and left.stat().st_uid == os.getuid():
                shutil.rmtree(left, ignore_errors=True)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "save")

    def _write(self, staged: Path, then: Callable[[], None]) -> None:
        try:
            with told_when_unwritten(self._folder), writing():
                copied = staging(self._folder) / staged.name
                shutil.copytree(staged, copied, copy_function=_move)
                publish(copied, self._folder)
        finally:
            shutil.rmtree(staged.parent, ignore_errors=True)
        then()


def _move(source: str, target: str) -> None:
    """Copy a file and give its memory back."""
    shutil.copy(source, target)
    os.unlink(source)
