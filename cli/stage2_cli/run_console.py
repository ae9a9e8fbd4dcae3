"""The console of `stage2 run` while a job runs: a status line on a terminal, plain lines elsewhere, logs on failure."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console
from rich.status import Status

from stage2_api.pod.report import LearnerPhase, LearnerReport, read_report
from stage2_cli.log_tail import LogTail
from stage2_cli.processes import LocalProcess

# They alternate many times a step: for a status line that overwrites itself, not for a log.
_PHASES_OF_A_STEP: tuple[LearnerPhase, ...] = ("syncing", "rollout", "training")


@functools.cache
def console() -> Console:
    """The console on standard output that all of `stage2 run` writes to."""
    return Console(highlight=False, soft_wrap=True)


class Watcher:
    """Shows where a run is: from the learner's /progress and from the JSON lines in its log."""

    def __init__(self, log: Path | None = None, progress_url: str | None = None, token: str = "") -> None:
        self._progress_url = progress_url
        self._log = LogTail(log, offset=log.stat().st_size if log.exists() else 0) if log else None
        self._client = httpx.Client(trust_env=False, timeout=2.0, headers={"Authorization": f"Bearer {token}"})
        self._status = Status("starting", console=console())
        self._last = ""

    def __enter__(self) -> Watcher:
        if console().is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()
        self._client.close()

    def show(self, text: str) -> None:
        """Say where the run is, once for each new text where there is no terminal."""
        if text == self._last:
            return
        self._last = text
        if console().is_terminal:
            self._status.update(text)
        else:
            console().print(text)

    def refresh(self) -> None:
        """Show new records of the learner's log, then its progress."""
        for record in self._new_records():
            if line := describe(record):
                console().print(line)
        progress = self._progress()
        if progress and (console().is_terminal or progress.phase not in _PHASES_OF_A_STEP):
            self.show(f"learner: {progress.phase}, step {progress.step} of {progress.max_steps}")

    def failure(self, process: LocalProcess, what: str) -> None:
        """Say what happened to a process and show the last lines of its log."""
        console().print(f"[bold red]{process.name} {what}[/]; the last lines of {process.log}:")
        console().print(process.tail(), markup=False)

    def _progress(self) -> LearnerReport | None:
        if self._progress_url is None:
            return None
        try:
            answer = self._client.get(self._progress_url)
        except httpx.TransportError:
            return None  # not listening yet, or already gone: the exit code tells the rest
        return read_report(answer.json()) if answer.status_code == 200 else None

    def _new_records(self) -> list[dict[str, Any]]:
        lines = self._log.new_lines() if self._log else ()
        return [record for line in lines if (record := parse_record(line.decode(errors="replace")))]


def parse_record(line: str) -> dict[str, Any] | None:
    """A log line as a record, or None when it is not one of the learner's JSON lines."""
    if not line.startswith('{"event"'):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record


def describe(record: dict[str, Any]) -> str | None:
    """One line about a record for people, or None for a record that is only for machines."""
    if record["event"] == "step" and "reward" in record:
        return f"step {record['step']}: loss {record['loss']:.3f}, mean reward {record['reward']:.3f}"
    if record["event"] == "step" and "supervised/objects" in record:
        return f"step {record['step']}: loss {record['loss']:.3f}, {record['supervised/objects']:.0f} objects"
    if record["event"] == "step":
        return (
            f"step {record['step']}: loss {record['loss']:.3f}, "
            f"matched {record.get('rollout/matched_for_supervision', 0):.0f} "
            f"of {record.get('rollout/gt_objects', 0):.0f} objects"
        )
    if record["event"] == "evaluation" and "eval_reward" in record:
        return f"evaluation at step {record['step']}: mean reward {record['eval_reward']:.3f}"
    if record["event"] == "evaluation":
        named = record.get("eval_rollout_f1_class_iou50")
        with_class = "" if named is None else f", {named:.3f} with class at IoU 0.5"
        return f"evaluation at step {record['step']}: F1 {record['eval_rollout_f1']:.3f}{with_class}"
    return None
