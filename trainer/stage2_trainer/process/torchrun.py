"""Several learner processes on one machine: torchrun, with an exit code that says what the processes meant by theirs.

torchrun itself ends with 1 whatever its processes ended with, so that nobody could tell a mistake in the configuration,
which must never be tried again, from a lost server.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE
from stage2_trainer.process.checkpoints import LOCK_VARIABLE, is_saving

LOOKED_EVERY_S = 0.1


class _PatientContext(SubprocessContext):
    """Processes that are killed when none of them has been busy for a time since they were asked to end."""

    def __init__(self, *args: Any, busy: Callable[[], bool], longest_hang_s: int, **kwargs: Any) -> None:
        self._busy = busy
        self._longest_hang_s = longest_hang_s
        super().__init__(*args, **kwargs)

    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        super().close(death_sig, self._longest_hang_s if timeout is None else timeout)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        for handler in self._running():
            handler.close(death_sig=death_sig)
        end = time.monotonic() + timeout
        while self._running() and time.monotonic() < end:
            if self._busy():
                end = time.monotonic() + timeout  # what follows, to its exit, gets its time too
            time.sleep(LOOKED_EVERY_S)
        super()._close(signal.SIGKILL, timeout)

    def _running(self) -> list[Any]:
        return [one for one in self.subprocess_handlers.values() if one.proc.poll() is None]


@contextmanager
def patient_ends(busy: Callable[[], bool], longest_hang_s: int) -> Iterator[None]:
    """Have torchrun leave processes alone while `busy` says so, and kill them `longest_hang_s` seconds after that."""
    multiprocessing.SubprocessContext = partial(  # type: ignore[assignment,misc]
        _PatientContext, busy=busy, longest_hang_s=longest_hang_s
    )
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = SubprocessContext  # type: ignore[misc]


LONGEST_END_S = 3600
"""Seconds after which torchrun kills a process that was asked to stop. The pod's own grace period is to decide: without
the option torchrun has 30 s of patience, and a large save takes longer."""
LONGEST_HANG_S = 30
"""Seconds after which a process is killed that does not end though another one has failed, and that writes no
checkpoint (`process.writing`): on GPUs it waits in NCCL for the one that has gone."""

logger = logging.getLogger(__name__)


def run_processes(module: str, arguments: Sequence[str], *, processes: int) -> int:
    """Run `python -m module arguments` once for each rank; return 0 when all of them do.

    Of different exit codes EXIT_CONFIG comes first and EXIT_RETRYABLE second: the others are what a rank ends with
    that has lost its peers. A signal to this process reaches all of them and counts as EXIT_RETRYABLE. When one fails
    the others are asked to end, and one that writes a checkpoint is waited for.
    """
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={LONGEST_END_S}"]
    try:
        with _checkpoints_finished():
            run(parse_args([*options, "--module", module, *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        logger.error("exit codes of the processes that failed, by rank: %s", codes)
        return joined_exit_code(codes.values())
    except SignalException as signal:
        logger.error("asked to stop (%s)", signal.sigval.name)
        return EXIT_RETRYABLE
    return os.EX_OK


@contextmanager
def _checkpoints_finished() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="stage2-writing-", ignore_cleanup_errors=True) as folder:
        lock = Path(folder, "lock")
        lock.touch()
        os.environ[LOCK_VARIABLE] = str(lock)  # torchrun's processes inherit it
        try:
            with patient_ends(partial(is_saving, lock), LONGEST_HANG_S):
                yield
        finally:
            del os.environ[LOCK_VARIABLE]


def joined_exit_code(codes: Collection[int]) -> int:
    """Return the code that tells most; a process that a signal ended has a negative one, and counts as 1."""
    for telling in (EXIT_CONFIG, EXIT_RETRYABLE):
        if telling in codes:
            return telling
    return max(1, *codes)
