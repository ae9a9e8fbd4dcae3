"""The trace of a run (`training.trace`): Chrome's trace-event JSON, which https://ui.perfetto.dev opens.

One track for each thread of the learner, with its spans nested, and one for each server, with the requests that it has.
The file is valid as far as it has come: the format lets the closing bracket be missing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from stage2_api.runconfig import RunConfig
from stage2_trainer.telemetry.intervals import Interval, Named

TRACE_FILE = "trace.json"
MOST_EVENTS = 500_000  # some 60 MB, which a browser still opens
_WAITING_EVENTS = 1_000
_LEARNER = 1  # the process id of the learner in the trace; servers have those after it


class TraceFile:
    """A trace that is written while the run goes on; after `most` events nothing is added but that it is full."""

    def __init__(self, path: Path, *, process: str, most: int = MOST_EVENTS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._left = most
        self._origin = perf_counter()
        self._threads: dict[str, int] = {}
        self._servers: dict[str, int] = {}
        self._add({"ph": "M", "pid": _LEARNER, "name": "process_name", "args": {"name": process}})

    def span(self, thread: str, span: Named, figures: Mapping[str, float] | None = None) -> None:
        """Add a span of a thread."""
        name, start, end = span
        with self._lock:
            if thread not in self._threads:
                self._threads[thread] = len(self._threads) + 1
                event = {"ph": "M", "pid": _LEARNER, "tid": self._threads[thread], "name": "thread_name"}
                self._add({**event, "args": {"name": thread}})
            event = {"ph": "X", "pid": _LEARNER, "tid": self._threads[thread], "name": name, "ts": self._us(start)}
            self._add({**event, "dur": self._us(end) - self._us(start), "args": dict(figures or {})})

    def request(self, server: str, number: int, times: Interval) -> None:
        """Add a request of a server, by a number that no other has."""
        with self._lock:
            if server not in self._servers:
                self._servers[server] = _LEARNER + len(self._servers) + 1
                self._add({"ph": "M", "pid": self._servers[server], "name": "process_name", "args": {"name": server}})
            event = {"pid": self._servers[server], "tid": 0, "cat": "rollout", "name": "request", "id": number}
            self._add({**event, "ph": "b", "ts": self._us(times[0])})
            self._add({**event, "ph": "e", "ts": self._us(times[1])})

    def flush(self) -> None:
        """Bring what there is to the disk."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """End the file."""
        with self._lock:
            self._write()
            if not self._file.closed:
                self._file.write('{"ph": "M", "pid": 1, "name": "process_sort_index", "args": {"sort_index": 0}}\n]\n')
                self._file.close()

    def _us(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 1)

    def _add(self, event: Mapping[str, Any]) -> None:
        if self._left == 0:
            return
        self._left -= 1
        if self._left == 0:
            event = {
                "ph": "i",
                "s": "g",
                "pid": _LEARNER,
                "tid": 1,
                "name": "the trace is full",
                "ts": event.get("ts", 0),
            }
        self._waiting.append(json.dumps(event))
        if len(self._waiting) >= _WAITING_EVENTS:
            self._write()

    def _write(self) -> None:
        if self._waiting and not self._file.closed:
            self._file.write(",\n".join(self._waiting) + ",\n")
            self._file.flush()
        self._waiting.clear()


def open_trace(config: RunConfig, rank: int, stack: ExitStack) -> TraceFile | None:
    """Open this process's trace in the output folder, where one is asked for; `stack` closes it."""
    if not config.training.trace:
        return None
    name = TRACE_FILE if rank == 0 else f"rank-{rank}-{TRACE_FILE}"
    trace = TraceFile(Path(config.training.output_dir) / name, process=f"learner {rank}")
    stack.callback(trace.close)
    return trace
