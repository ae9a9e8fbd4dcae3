"""The console of `stage2 run` while a job runs: a status line on a terminal, plain lines elsewhere, logs on failure."""

from __future__ import annotations

import functools
import json
import ssl
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from stage2_api.pod.report import LearnerPhase, LearnerReport, read_report
from stage2_cli.processes import LocalProcess
from stage2_report.run_history import parse_record

_PHASES_OF_A_STEP: tuple[LearnerPhase, ...] = ("syncing", "rollout", "training")
"""Phases that alternate many times a step: shown in a status line, which overwrites itself, and not in a log."""


TIMEOUT_S = 2.0


@functools.cache
def console() -> Console:
    """Return the console on standard output that all of `stage2 run` uses."""
    return Console(highlight=False, soft_wrap=True)


class LocalClient:
    """A client of a run's processes. authority: the certificate that signed theirs."""

    def __init__(self, authority: Path, token: str) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        trusted = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=authority))
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), trusted)

    def get(self, url: str) -> bytes | None:
        """Return the body of an answer with status 200; None for any other, and where nobody answers."""
        try:
            with self._opener.open(urllib.request.Request(url, headers=self._headers), timeout=TIMEOUT_S) as answer:
                body: bytes = answer.read()
                return body if answer.status == HTTPStatus.OK else None
        except (OSError, HTTPException):
            return None


class Watcher:
    """Shows the progress of a run, from the learner's /progress and from the JSON lines in its log."""

    def __init__(self, log: Path | None = None, client: LocalClient | None = None, progress_url: str = "") -> None:
        self._client, self._progress_url = client, progress_url
        self._log = log
        self._offset = log.stat().st_size if log is not None and log.exists() else 0
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

    def show(self, text: str) -> None:
        """Show a status; where there is no terminal, each new text once."""
        if text == self._last:
            return
        self._last = text
        if console().is_terminal:
            self._status.update(text)
        else:
            console().print(text)

    def refresh(self) -> None:
        """Print new records of the learner's log, then show its progress."""
        for record in self._new_records():
            if line := describe(record):
                console().print(line)
        progress = self._progress()
        if progress and (console().is_terminal or progress.phase not in _PHASES_OF_A_STEP):
            self.show(f"learner: {progress.phase}, step {progress.step} of {progress.max_steps}")

    def failure(self, process: LocalProcess, what: str) -> None:
        """Print what happened to a process and the last lines of its log."""
        console().print(f"[bold red]{process.name} {what}[/]; the last lines of {process.log}:")
        console().print(process.tail(), markup=False)

    def _progress(self) -> LearnerReport | None:
        # Nobody answers before the learner listens, and after it has gone: the exit code tells the rest.
        body = self._client.get(self._progress_url) if self._client is not None else None
        return None if body is None else read_report(json.loads(body))

    def _new_records(self) -> list[dict[str, Any]]:
        """Return the records of the lines that are complete since the last call."""
        if self._log is None or not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := parse_record(line))]


def describe(record: dict[str, Any]) -> str | None:
    """Return a line about a record for people; None for a record that is only for machines."""
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
