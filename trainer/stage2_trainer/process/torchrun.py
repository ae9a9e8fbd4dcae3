"""Several learner processes on one machine: torchrun, with an exit code that keeps the meaning of theirs.

torchrun itself always ends with 1. A mistake in the configuration, which must never be retried, would look like a lost
server.

It also cuts checkpoints off. When one process fails, torchrun 2.13 asks the others to end and kills them 30 s later:
`SubprocessContext._poll` calls `close` with its default, whatever `--shutdown-timeout` says. `_PatientContext` patches
that. No upstream issue found. It goes when torch heeds that option there, and a save can hold the kill off.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
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

LONGEST_END_S = 3600
"""Seconds after which torchrun kills a process that was asked to stop. The pod's own grace period shall decide: without
the option torchrun waits for 30 s, and a large save takes longer."""
LONGEST_HANG_S = 30
"""Seconds that a process gets to end once another one has failed, unless it writes a checkpoint
(`checkpoints.save_lock`): on GPUs it waits in NCCL for the one that has gone."""
POLL_S = 0.1

logger = logging.getLogger(__name__)


def run_processes(module: str, arguments: Sequence[str], *, processes: int) -> int:
    """Run `python -m module arguments` once for each rank; return 0 when all of them do.

    Of different exit codes EXIT_CONFIG comes first and EXIT_RETRYABLE second, since a rank that has lost its peers ends
    with any other. A signal to this process reaches all of them and counts as EXIT_RETRYABLE. When one fails, the
    others are asked to end, and those that write a checkpoint may finish it.
    """
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={LONGEST_END_S}"]
    try:
        with _checkpoints_finished():
            run(parse_args([*options, "--module", module, *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        logger.error("exit codes of the processes that failed, by rank: %s", codes)
        return joined_exit_code(codes.values())
    except SignalException as received:
        logger.error("asked to stop (%s)", received.sigval.name)
        return EXIT_RETRYABLE
    return os.EX_OK


def joined_exit_code(codes: Collection[int]) -> int:
    """Return the most informative exit code; a process that a signal ended has a negative one, and counts as 1."""
    for code in (EXIT_CONFIG, EXIT_RETRYABLE):
        if code in codes:
            return code
    return max(1, *codes)


class _PatientContext(SubprocessContext):
    """Processes that are killed some time after they were asked to end, or after the last of them has saved."""

    def __init__(self, *args: Any, lock: Path, longest_hang_s: int, **kwargs: Any) -> None:
        self._lock = lock
        self._longest_hang_s = longest_hang_s
        super().__init__(*args, **kwargs)

    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        super().close(death_sig, self._longest_hang_s if timeout is None else timeout)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        for handler in self._running():
            handler.close(death_sig=death_sig)
        end = time.monotonic() + timeout
        while self._running() and time.monotonic() < end:
            if is_saving(self._lock):
                end = time.monotonic() + timeout  # from the save to the exit it gets that time too
            time.sleep(POLL_S)
        super()._close(signal.SIGKILL, timeout)

    def _running(self) -> list[Any]:
        return [one for one in self.subprocess_handlers.values() if one.proc.poll() is None]


@contextmanager
def _checkpoints_finished() -> Iterator[None]:
    """Make torchrun wait for processes that write a checkpoint, and kill others after `LONGEST_HANG_S`."""
    with tempfile.TemporaryDirectory(prefix="stage2-writing-", ignore_cleanup_errors=True) as folder:
        lock = Path(folder, "lock")
        lock.touch()
        os.environ[LOCK_VARIABLE] = str(lock)  # torchrun's processes inherit it
        patient = partial(_PatientContext, lock=lock, longest_hang_s=LONGEST_HANG_S)
        multiprocessing.SubprocessContext = patient  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            multiprocessing.SubprocessContext = SubprocessContext  # type: ignore[misc]
            del os.environ[LOCK_VARIABLE]
