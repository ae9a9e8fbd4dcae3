"""The first process of a pod's container, before it has a handler of SIGTERM of its own.

The kernel drops a signal to process 1 for which it has no handler, and a kubelet sends SIGTERM once: without one, a
container that still starts keeps its GPUs for all of its grace period. It has nothing to save yet.
"""

from __future__ import annotations

import os
import signal

from stage2_api.errors import EXIT_RETRYABLE


def is_first_process() -> bool:
    """Return whether this is the first process of a container."""
    return os.getpid() == 1


def end_at_sigterm() -> None:
    """Let SIGTERM end this process at once, if it is the first one. Later handlers replace this one."""
    if is_first_process():
        signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    os._exit(EXIT_RETRYABLE)  # wherever it is: an import may catch SystemExit, or hold a lock that an exit waits for
