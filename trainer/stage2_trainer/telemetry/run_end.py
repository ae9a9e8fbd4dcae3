"""The last line of the run's log: how the run ended, for those who look on from outside."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from stage2_api.log_lines import one_line
from stage2_api.pod.report import MESSAGE_CHARACTERS
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog

END = "end"
logger = logging.getLogger(__name__)


@contextmanager
def end_told(log: EventLog, reporter: Reporter) -> Iterator[None]:
    """Write down how the block ends: `done`, `stopped` or `failed`, and why. What kills the process says nothing."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, (Interrupted, KeyboardInterrupt))
        _tell(log, reporter, "stopped" if stopped else "failed", f"{error}" or type(error).__name__)
        raise
    _tell(log, reporter, "done", "")


def _tell(log: EventLog, reporter: Reporter, outcome: str, message: str) -> None:
    told = {"step": reporter.current.step, "outcome": outcome, "message": one_line(message)[:MESSAGE_CHARACTERS]}
    try:
        log.write(END, told)
    except OSError as error:  # a full disk: what ended the run is on its way, and says more
        logger.warning("the end of the run could not be written down: %s", error)
