"""The timeline of this process: what its threads do, which requests its servers have, and when.

There is one for the process, like the root logger, since a process has one run: nobody has to pass it on. It feeds the
split of each step (`step_time`) and the trace, if there is one.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TextIO

from stage2_api.runconfig import RunConfig
from stage2_trainer.telemetry.step_time import Interval, Named, StepTime, step_time


class Stopwatch:
    """Seconds by name, summed over the micro-steps of an optimizer step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's time to `name`, and record it on the process's timeline."""
        start = perf_counter()
        with TIMELINE.measure(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def add(self, other: Stopwatch) -> None:
        """Add the seconds of another one."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds


TRACE_FILE = "trace.json"
MOST_EVENTS = 500_000  # some 60 MB, which a browser still opens
_LEARNER = 1  # the process id of the learner in the trace; servers have those after it


class TraceFile:
    """A trace for Perfetto, written as the run proceeds. After `most` events a last one states that it is full."""

    def __init__(self, path: Path, *, process: str, most: int = MOST_EVENTS) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._file.write("[\n")
        self._lock = threading.Lock()
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
        """Add a request of a server, by its unique number."""
        with self._lock:
            if server not in self._servers:
                self._servers[server] = _LEARNER + len(self._servers) + 1
                self._add({"ph": "M", "pid": self._servers[server], "name": "process_name", "args": {"name": server}})
            event = {"pid": self._servers[server], "tid": 0, "cat": "rollout", "name": "request", "id": number}
            self._add({**event, "ph": "b", "ts": self._us(times[0])})
            self._add({**event, "ph": "e", "ts": self._us(times[1])})

    def flush(self) -> None:
        """Write buffered events."""
        with self._lock:
            self._file.flush()

    def close(self) -> None:
        """Complete and close the file; later events are dropped."""
        with self._lock:
            if not self._file.closed:
                self._file.write('{"ph": "M", "pid": 1, "name": "process_sort_index", "args": {"sort_index": 0}}\n]\n')
                self._file.close()

    def _us(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 1)

    def _add(self, event: Mapping[str, Any]) -> None:
        if self._left == 0 or self._file.closed:
            return
        self._left -= 1
        if self._left == 0:
            full = {"ph": "i", "s": "g", "pid": _LEARNER, "tid": 1, "name": "the trace is full"}
            event = {**full, "ts": event.get("ts", 0)}
        self._file.write(json.dumps(event) + ",\n")


def open_trace(config: RunConfig, rank: int, stack: ExitStack) -> TraceFile | None:
    """Open this process's trace in the output folder, if configured; `stack` closes it."""
    if not config.training.trace:
        return None
    name = TRACE_FILE if rank == 0 else f"rank-{rank}-{TRACE_FILE}"
    trace = TraceFile(Path(config.training.output_dir) / name, process=f"learner {rank}")
    stack.callback(trace.close)
    return trace


class Timeline:
    """Spans of threads and requests of servers while a step is under way; any thread may add to it."""

    def __init__(self) -> None:
        self.trace: TraceFile | None = None
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Named]] = []  # with the name of the thread
        self._done: dict[str, list[Interval]] = {}
        self._under_way: dict[int, tuple[str, float]] = {}
        self._numbers = itertools.count(1)
        self._start = perf_counter()
        self._cpu_start = process_time()
        self._open = False

    def set_servers(self, servers: Sequence[str]) -> None:
        """Set the servers to report on; a server without requests counts too."""
        with self._lock:
            self._done = {server: [] for server in servers}

    def begin(self) -> None:
        """Begin an optimizer step."""
        with self._lock:
            self._spans.clear()
            for requests in self._done.values():
                requests.clear()
            self._open = True
            self._start, self._cpu_start = perf_counter(), process_time()

    def end(self, step: int) -> StepTime:
        """End the step, and return its split; the calling thread is the one that trains."""
        thread = threading.current_thread().name
        with self._lock:
            window, cpu = (self._start, perf_counter()), process_time() - self._cpu_start
            requests = {server: list(times) for server, times in self._done.items()}
            for server, start in self._under_way.values():
                requests.setdefault(server, []).append((start, window[1]))
            spans = list(self._spans)
            self._open = False
        training = [span for name, span in spans if name == thread]
        split = step_time(window, training, [span for name, span in spans if name != thread], requests)
        found = replace(split, cpu=cpu)
        if self.trace is not None:
            self.trace.span(thread, (f"step {step}", *window), found.figures())
            self.trace.flush()
        return found

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Record the block as a span of this thread."""
        start = perf_counter()
        try:
            yield
        finally:
            self.note(name, start)

    def note(self, name: str, start: float) -> None:
        """Record a span of this thread that began at `start` and ends now."""
        thread, span = threading.current_thread().name, (name, start, perf_counter())
        with self._lock:
            if self._open:
                self._spans.append((thread, span))
        if self.trace is not None:
            self.trace.span(thread, span)

    @contextmanager
    def request(self, server: str) -> Iterator[None]:
        """Record the block as a request of the server."""
        number, start = next(self._numbers), perf_counter()
        with self._lock:
            self._under_way[number] = (server, start)
        try:
            yield
        finally:
            end = perf_counter()
            with self._lock:
                del self._under_way[number]
                if self._open:
                    self._done.setdefault(server, []).append((start, end))
            if self.trace is not None:
                self.trace.request(server, number, (start, end))


TIMELINE = Timeline()
"""The timeline of this process."""
