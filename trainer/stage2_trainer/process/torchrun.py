"""Several learner processes on one machine: torchrun, with an exit code that keeps the meaning of theirs.

torchrun itself always ends with 1. A mistake in the configuration, which must never be retried, would look like a lost
server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE

LONGEST_END_S = 3600
"""Seconds after which torchrun kills a process that was asked to stop. The pod's own grace period shall decide: without
the option torchrun waits for 30 s, and a large save takes longer."""

logger = logging.getLogger(__name__)


def run_processes(module: str, arguments: Sequence[str], *, processes: int) -> int:
    """Run `python -m module arguments` once for each rank; return 0 when all of them do.

    Of different exit codes EXIT_CONFIG comes first and EXIT_RETRYABLE second, since a rank that has lost its peers ends
    with any other. A signal to this process reaches all of them and counts as EXIT_RETRYABLE. When one fails, torchrun
    asks the others to end and kills them 30 s later: on GPUs they wait in NCCL for the one that has gone.
    """
    options = ["--standalone", f"--nproc-per-node={processes}", f"--shutdown-timeout={LONGEST_END_S}"]
    try:
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
