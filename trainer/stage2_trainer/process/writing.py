"""Telling the launcher that a process writes a checkpoint: it is not killed meanwhile, though another one has ended.

By a lock on a file that the launcher names: the kernel lets go of it whatever becomes of the process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LOCK_VARIABLE: Final = "STAGE2_WRITING_LOCK"
"""Path of the file that the launcher of several processes looks at; unset, nobody looks."""


@contextmanager
def writing() -> Iterator[None]:
    """Say for the time of the block that this process writes what must not be cut off."""
    path = os.environ.get(LOCK_VARIABLE)
    if path is None:
        yield
        return
    with Path(path).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing would not do: a process forked meanwhile has the file open too


def is_writing(lock: Path) -> bool:
    """Whether any process says so."""
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
