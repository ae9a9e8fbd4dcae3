"""Telling the launcher that a process writes a checkpoint: it is not killed meanwhile, though another one has ended.

By a lock on a file that the launcher names: the kernel lets go of it whatever becomes of the process.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LOCK_VARIABLE: Final = "STAGE2_WRITING_LOCK"
"""Path of the file that the launcher of several processes looks at; unset, nobody looks."""


@contextmanager
def writing() -> Iterator[None]:
    """Say for the time of the block that this process writes what must not be cut off."""
    path = os.environ.get(LOCK_VARIABLE)
    if path is None:
        yield
        return
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(Path(path).open("r+b"))
            fcntl.flock(lock, fcntl.LOCK_SH)
            # closing would not do: a process forked meanwhile has the file open too
            stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        except OSError as error:  # no save fails for what only protects it
            logger.warning("the launcher cannot be told that a checkpoint is written (%s: %s)", path, error)
        yield


def is_writing(lock: Path) -> bool:
    """Whether any process says so; nobody can where the file has gone or its file system has no locks."""
    try:
        with lock.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
