"""`stage2 learn --restarts N`: a learner that is started again in its own container, which keeps its node and its GPUs.

A container that ends gives both away until its Job has made another pod. What no other try can mend ends it at once.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from stage2_api.errors import EXIT_CONFIG, EXIT_EXHAUSTED, EXIT_RETRYABLE
from stage2_api.pod.layout import RESTARTS_VARIABLE, TERMINATION_LOG_VARIABLE
from stage2_cli.processes import end_with_parent

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # before the first restart, then twice as long each time, as a Job waits
LONGEST_PAUSE_S = 360.0


class Restarts:
    """A command that is run until it succeeds, must not be tried again, was told to end, or has had all its tries.

    once: words of the first try alone.
    """

    def __init__(self, command: Sequence[str], once: Sequence[str] = (), *, pause_s: float = PAUSE_S) -> None:
        self._command = command
        self._once = once
        self._pause_s = pause_s
        self._told_to_end = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, restarts: int) -> int:
        """Return 0 or EXIT_CONFIG of the command, EXIT_RETRYABLE when told to end, EXIT_EXHAUSTED after all tries."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        for attempt in range(restarts + 1):
            code = self._try(attempt)
            if code in (os.EX_OK, EXIT_CONFIG):
                return code
            if self._told_to_end.is_set():
                return EXIT_RETRYABLE
            if attempt < restarts:
                self._pause(attempt, restarts, code)
        logger.error("exit code %d; started again %d times, which is all it may be", code, restarts)
        return EXIT_EXHAUSTED

    def _try(self, attempt: int) -> int:
        _forget_last_words()
        self._process = subprocess.Popen(
            [*self._command, *(() if attempt else self._once)],
            env={**os.environ, RESTARTS_VARIABLE: str(attempt)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        if self._told_to_end.is_set():
            self._process.terminate()
        code = self._process.wait()
        with suppress(ProcessLookupError):  # a worker that it left would hold memory that the next try needs
            os.killpg(self._process.pid, signal.SIGKILL)
        return code

    def _pause(self, attempt: int, restarts: int, code: int) -> None:
        pause_s = min(self._pause_s * 2.0**attempt, LONGEST_PAUSE_S)
        logger.warning("exit code %d; starting again in %g s (%d of %d)", code, pause_s, attempt + 1, restarts)
        self._told_to_end.wait(pause_s)

    def _end(self, *_: object) -> None:
        self._told_to_end.set()
        if self._process is not None:
            self._process.terminate()


def _forget_last_words() -> None:
    """Empty the termination log: what an earlier try said is not why a later one ended."""
    path = os.environ.get(TERMINATION_LOG_VARIABLE)
    if path and Path(path).exists():
        Path(path).write_text("", encoding="utf-8")
