"""Several learner processes, on one machine or several: torchrun, with an exit code that keeps the meaning of theirs.

torchrun itself always ends with 1. A mistake in the configuration, which must never be retried, would look like a lost
server.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError, Problem
from stage2_trainer.process.background import in_background

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LONGEST_END_S = 3600
"""Seconds after which torchrun kills a process that was asked to stop. The pod's own grace period shall decide: without
the option torchrun waits for 30 s, and a large save takes longer."""
LOOKS_AGAIN_S = 2.0
"""Seconds between looks at whether the other machines are here."""

LAST_PORT = 65535

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
        if found is None or int(found[1]) >= int(found[2]) or not 0 < int(found[4]) <= LAST_PORT:
            rule = f"must be INDEX/COUNT@HOST:PORT, an index from 0 and below the count, and a port up to {LAST_PORT}"
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
    os._exit(EXIT_RETRYABLE)  # an ordinary exit aborts where a thread is inside a TCPStore


def _meet(node: Node) -> TCPStore | None:
    """Return once all machines are here; on the first one the result is the server that torchrun's own wait uses.

    That wait runs no handler of a signal, ends after ten minutes, and a pod's first process ignores SIGTERM without a
    handler.
    """
    logger.info("waiting for the learner's other machines")
    if node.index == 0:
        return _welcome_others(node)
    # A first machine that stands still holds its callers for good, and they run no handler either.
    in_background(_wait_for_welcome, node).result()
    return None


def _welcome_others(node: Node) -> TCPStore:
    store = _store("localhost", node)  # a pod's own name may not be known yet
    others = [f"machine-{index}" for index in range(1, node.count)]
    while not store.check(others):
        # A machine that still waits calls again. One that ends within this time is welcomed, and costs ten minutes.
        for other in others:
            store.delete_key(other)
        time.sleep(2 * LOOKS_AGAIN_S)
    for process in store.multi_get(others):
        store.set(process.decode(), "welcome")
    return store


def _wait_for_welcome(node: Node) -> None:
    """Return once the first machine has met this process, not one of an earlier attempt."""
    from torch.distributed import DistError

    process = uuid.uuid4().hex
    while True:
        try:
            store = _store(node.host, node)
            while not store.check([process]):
                store.set(f"machine-{node.index}", process)
                time.sleep(LOOKS_AGAIN_S)
            return
        except DistError:  # the first one is not there, or not any more
            time.sleep(LOOKS_AGAIN_S)


def _store(host: str, node: Node) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    wait = timedelta(seconds=LOOKS_AGAIN_S)
    return TCPStore(host, node.port, is_master=node.index == 0, timeout=wait, wait_for_workers=False, multi_tenant=True)


def joined_exit_code(codes: Collection[int]) -> int:
    """Return the most informative exit code; a process that a signal ended has a negative one, and counts as 1."""
    for code in (EXIT_CONFIG, EXIT_RETRYABLE):
        if code in codes:
            return code
    return max(1, *codes)
