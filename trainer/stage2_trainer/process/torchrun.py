"""Several learner processes, on one machine or several: torchrun, with an exit code that keeps the meaning of theirs.

torchrun itself always ends with 1. A mistake in the configuration, which must never be retried, would look like a lost
server.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError, Problem

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LONGEST_END_S = 3600
"""Seconds after which torchrun kills a process that was asked to stop. The pod's own grace period shall decide: without
the option torchrun waits for 30 s, and a large save takes longer."""
LOOKS_AGAIN_S = 2.0
"""Seconds between looks at whether the other machines are here."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """One of the machines, or pods, that share the learner's processes evenly; the first has the lowest ranks."""

    index: int
    count: int
    host: str  # of the first
    port: int

    @classmethod
    def parse(cls, text: str) -> Node:
        """Return the node of INDEX/COUNT@HOST:PORT. Raises ConfigError."""
        found = re.fullmatch(r"(\d+)/(\d+)@([^:@/]+):(\d+)", text)
        if found is None or int(found[1]) >= int(found[2]):
            rule = "must be INDEX/COUNT@HOST:PORT, with an index from 0 and below the count"
            way_out = "number the nodes from 0, and name the first one's host, such as 0/2@10.0.0.5:29400"
            raise ConfigError((Problem("--node", text, rule, way_out),))
        return cls(int(found[1]), int(found[2]), found[3], int(found[4]))

    def options(self) -> list[str]:
        """Return torchrun's options. Ranks follow from the index, so that the same pod always has the first."""
        where = [f"--master-addr={self.host}", f"--master-port={self.port}"]
        return [f"--nnodes={self.count}", f"--node-rank={self.index}", *where]


def run_processes(module: str, arguments: Sequence[str], *, processes: int, node: Node | None = None) -> int:
    """Run `python -m module arguments` once for each rank; return 0 when all of them do. node: None: there is one.

    Of different exit codes EXIT_CONFIG comes first and EXIT_RETRYABLE second, since a rank that has lost its peers ends
    with any other. A signal to this process reaches all of them and counts as EXIT_RETRYABLE. When one fails, torchrun
    asks the others to end and kills them 30 s later: on GPUs they wait in NCCL for the one that has gone.
    """
    signal.signal(signal.SIGTERM, _end)  # torchrun handles it later, once it starts processes
    # Here, because a mistake in the configuration is reported before PyTorch is imported, which takes seconds.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    met = _meet(node) if node else None
    where = node.options() if node else ["--standalone"]
    options = [*where, f"--nproc-per-node={processes}", f"--shutdown-timeout={LONGEST_END_S}"]
    try:
        run(parse_args([*options, "--module", module, *arguments]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        logger.error("exit codes of the processes that failed, by rank: %s", codes)
        return joined_exit_code(codes.values())
    except SignalException as received:
        logger.error("asked to stop (%s)", received.sigval.name)
        return EXIT_RETRYABLE
    finally:
        del met  # the server of the first machine, up to here
    return os.EX_OK


def _end(*_: object) -> None:
    logger.error("asked to stop (SIGTERM)")
    sys.exit(EXIT_RETRYABLE)


def _meet(node: Node) -> TCPStore:
    """Return once all machines are here; on the first one the result is the server that torchrun's own wait uses.

    That wait runs no handler of a signal, ends after ten minutes, and a pod's first process ignores SIGTERM without a
    handler.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    logger.info("waits for the learner's other machines")
    first, wait = node.index == 0, timedelta(seconds=LOOKS_AGAIN_S)
    host = "localhost" if first else node.host  # a pod's own name may not be known yet
    everyone = [f"machine-{index}" for index in range(node.count)]
    while True:
        try:
            store = TCPStore(host, node.port, is_master=first, timeout=wait, wait_for_workers=False, multi_tenant=True)
            store.set(everyone[node.index], "")
            while not store.check(everyone):
                time.sleep(LOOKS_AGAIN_S)
            return store
        except DistError:  # the first one is not there, or not any more
            if first:
                raise
            time.sleep(LOOKS_AGAIN_S)


def joined_exit_code(codes: Collection[int]) -> int:
    """Return the most informative exit code; a process that a signal ended has a negative one, and counts as 1."""
    for code in (EXIT_CONFIG, EXIT_RETRYABLE):
        if code in codes:
            return code
    return max(1, *codes)
