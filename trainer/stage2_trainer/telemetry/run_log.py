"""The files that a run writes beside its checkpoints: its logs, as JSON lines for people and programs.

Each line begins with its `event`: `reproducibility`, `start`, `step`, `evaluation`, `evaluation_sample`, `bad_sample`,
`best_checkpoint`, `warning`, `end`, `rollout`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from stage2_api.log_lines import json_text, one_line
from stage2_api.pod.report import MESSAGE_CHARACTERS
from stage2_api.runconfig import RunConfig
from stage2_trainer.model.checkpoints import PREFIX, UNFINISHED, UNPROVED, list_checkpoints
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import TRACE_FILE

STEP_LOG = "stage2_log.jsonl"
ROLLOUT_LOG = "rollouts.jsonl"
END = "end"
_SCORES = """
pred_objects gt_objects matched following fp fn precision recall f1 recall_iou50 f1_iou50 ap ap50 ap75 ar
f1_class_iou50 precision_class_iou50 recall_class_iou50 desc_exact duplicates objects_per_truth counting_error
parse_rate loop_rate gating_rejections parse_dropped_invalid parse_truncated_rate sample_valid_pred_rate
sample_any_match_rate matched_maskiou_mean ended_by_repetition ended_by_length
decode_steps_per_token draft_acceptance_rate
"""
EVALUATION_KEYS = (
    *(f"eval_{name}" for name in ("runtime", "samples_per_second", "steps_per_second", "bad_samples")),
    *(f"eval_rollout_{name}" for name in _SCORES.split()),
)
"""The keys of an `evaluation`; docs/log.md explains them."""

logger = logging.getLogger(__name__)


class JsonLines:
    """A file of JSON objects, one a line. `write` hands each to the system; after `flush` they are on disk.

    A half line that a crash has left is ended with a line break; readers skip it.
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
        """Return once everything written is on disk. Raises as `write`."""
        with self._named():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Raises as `write`, if buffered lines cannot be written."""
        with self._named():
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _ends_in_the_middle(path: Path) -> bool:
    """Whether a file's last line is unfinished."""
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class EventLog(Protocol):
    """A log of a run's events."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Log one event."""
        ...

    def flush(self) -> None:
        """Return once everything logged is on disk."""
        ...


class SilentLog:
    """The log of every learner process but the first, which logs for all."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Log nothing."""

    def flush(self) -> None:
        """Nothing was logged."""


class RunLog:
    """The learner's log: on stdout, where `kubectl logs` shows it, and in `stage2_log.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / STEP_LOG)

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Log one event."""
        document = {"event": event, **figures}
        self._lines.write(document)
        ACTIVITY.said()
        sys.stdout.write(json_text(document) + "\n")
        sys.stdout.flush()

    def flush(self) -> None:
        """Return once everything logged is on disk."""
        self._lines.flush()

    @contextmanager
    def keeping_warnings(self) -> Iterator[None]:
        """Write the process's warnings within the block into the file; not to stdout, since stderr has them already."""
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
    """Writes warnings and errors as events."""

    def __init__(self, lines: JsonLines) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        message = one_line(record.getMessage())[:MESSAGE_CHARACTERS]
        document = {"event": "warning", "level": record.levelname, "logger": record.name, "message": message}
        try:
            self._lines.write(document)
        except OSError:  # a full disk: the next step ends the run
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


@contextmanager
def logged_end(log: EventLog, reporter: Reporter) -> Iterator[None]:
    """Log how the block ends: `done`, `stopped` or `failed`, and why. A process that is killed logs nothing."""
    outcome, message = "done", ""
    try:
        yield
    except BaseException as error:
        outcome = "stopped" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
        message = f"{error}" or type(error).__name__
        raise
    finally:
        message = one_line(message)[:MESSAGE_CHARACTERS]
        try:
            log.write(END, {"step": reporter.current.step, "outcome": outcome, "message": message})
        except OSError as error:  # a full disk: an error that ended the run says more
            logger.warning("the end of the run could not be logged: %s", error)


def remove_run(folder: Path) -> list[Path]:
    """Remove what an earlier run has written, and nothing else; return the paths."""
    logs = [
        folder / STEP_LOG,
        *(file for name in (ROLLOUT_LOG, TRACE_FILE) for file in sorted(folder.glob(f"*{name}"))),
    ]
    checkpoints = (*list_checkpoints(folder), *sorted(folder.glob(f"{UNPROVED}{PREFIX}*")), folder / UNFINISHED)
    removed = [one for one in (*checkpoints, *logs) if one.exists()]
    for one in removed:
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink()
    return removed
