"""Several learner processes on one machine: torchrun, with an exit code that says what the processes meant by theirs.

torchrun itself ends with 1 whatever its processes ended with, so that nobody could tell a mistake in the configuration,
which must never be tried again, from a lost server.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE
from stage2_trainer.process.torchrun_compat import patient_ends
from stage2_trainer.process.writing import LOCK_VARIABLE, is_writing

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
            with patient_ends(partial(is_writing, lock), LONGEST_HANG_S):
                yield
        finally:
            del os.environ[LOCK_VARIABLE]


def joined_exit_code(codes: Collection[int]) -> int:
    """Return the code that tells most; a process that a signal ended has a negative one, and counts as 1."""
    for telling in (EXIT_CONFIG, EXIT_RETRYABLE):
        if telling in codes:
            return telling
    return max(1, *codes)
