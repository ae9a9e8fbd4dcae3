"""The logs of a run: JSON lines for people and programs.

Each line begins with its `event`: `reproducibility`, `start`, `step`, `evaluation`, `evaluation_sample`, `bad_sample`,
`best_checkpoint`, `warning`, `end`, `rollout`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from stage2_api.log_lines import one_line
from stage2_api.pod.report import MESSAGE_CHARACTERS
from stage2_api.runconfig import RunConfig

STEP_LOG = "stage2_log.jsonl"
ROLLOUT_LOG = "rollouts.jsonl"


class JsonLines:
    """A file that gets one JSON object a line, each handed to the system when `write` returns, on disk after `flush`.

    A half line that a crash has left is ended, so that nothing is glued to it: its readers pass over it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_off = _ends_in_the_middle(path)
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        if cut_off:
            self._file.write("\n")
            self._file.flush()

    def write(self, document: Mapping[str, Any]) -> None:
        """Append one object. Raises OSError with the file's name where it cannot be written."""
        with self._named():
            self._file.write(json.dumps(document, ensure_ascii=False) + "\n")
            self._file.flush()

    def flush(self) -> None:
        """Return once all that was written is on disk. Raises as `write`."""
        with self._named():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises as `write`, of what is still to be written."""
        with self._named():
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _ends_in_the_middle(path: Path) -> bool:
    """Whether a file's last line has no end."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class EventLog(Protocol):
    """A log of a run's events."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say one thing."""
        ...

    def flush(self) -> None:
        """Return once all that was said is on disk."""
        ...


class SilentLog:
    """The log of the learner processes but the first: that one speaks for all."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say nothing."""

    def flush(self) -> None:
        """Nothing was said."""


class RunLog:
    """The learner's log: on stdout, where `kubectl logs` shows it, and in `stage2_log.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / STEP_LOG)

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say one thing."""
        document = {"event": event, **figures}
        self._lines.write(document)
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def flush(self) -> None:
        """Return once all that was said is on disk."""
        self._lines.flush()

    @contextmanager
    def keeping_warnings(self) -> Iterator[None]:
        """Put into the file, and not on stdout, what the process warns of within the block: stderr says it already."""
        handler = _WarningLines(self._lines)
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class _WarningLines(logging.Handler):
    """A handler that writes warnings and errors as events."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        message = one_line(record.getMessage())[:MESSAGE_CHARACTERS]
        document = {"event": "warning", "level": record.levelname, "logger": record.name, "message": message}
        try:
            self._lines.write(document)
        except OSError:  # a full disk: the run's next step ends it
            self.handleError(record)


def open_logs(config: RunConfig, rank: int, stack: ExitStack) -> tuple[EventLog, JsonLines]:
    """Open the run's log, and the rollouts' log of this process, in the output folder; `stack` closes them."""
    folder = Path(config.training.output_dir)
    rollouts = JsonLines(folder / (ROLLOUT_LOG if rank == 0 else f"rank-{rank}-{ROLLOUT_LOG}"))
    stack.callback(rollouts.close)
    if rank:
        return SilentLog(), rollouts
    log = RunLog(folder)
    stack.callback(log.close)
    stack.enter_context(log.keeping_warnings())
    return log, rollouts
