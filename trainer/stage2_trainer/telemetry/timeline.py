"""The timeline of this process: what its threads do, which requests its servers have, and how a step splits.

There is one for the process, like the root logger, since a process has one run: nobody has to pass it on. It feeds the
trace, if there is one, and the split of a step's wall time, where each instant of the training thread has one part.
Where that thread waits for rollouts, the instant is `generate` while a server has a request of ours, else `encode` or
`match` while another thread does that, else `wait`.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TextIO

import numpy as np

from stage2_api.runconfig import RunConfig

Interval = tuple[float, float]
"""Begin and end, in seconds of one clock."""

Named = tuple[str, float, float]
"""A name, and the interval that has it."""

PARTS = (
    "generate", "wait", "encode", "match", "reward", "pack", "forward", "backward", "optimizer", "sync", "log", "other",
)  # fmt: skip
TRAINING = ("forward", "backward", "optimizer")

# The part that each stopwatch name belongs to; any other name is `other`.
PART_OF = {
    "rollout_generate": "generate",
    "rollout_teacher_encode": "encode",
    "rollout_parse_match": "match",
    "post_rollout_pack": "pack",
    "mask_build": "pack",
    **{part: part for part in ("wait", "reward", *TRAINING, "sync", "log")},
}


@dataclass(frozen=True)
class ServerTime:
    """One server during a step: the share of the time with a request of ours, and the mean number of requests."""

    server: str
    busy_share: float
    in_flight: float


@dataclass(frozen=True)
class StepTime:
    """The wall seconds of a step, in total and by part, its servers, and the CPU seconds of all threads."""

    wall: float = 0.0
    parts: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    servers: Sequence[ServerTime] = ()
    cpu: float = 0.0

    def figures(self) -> dict[str, float | None]:
        """Return the record's `step/*`; without a server, nothing is known of servers."""
        training = sum(self.parts[part] for part in TRAINING)
        count = len(self.servers)
        return {
            "step/wall_s": self.wall,
            "step/cpu_s": self.cpu,
            **{f"step/{part}_s": self.parts[part] for part in PARTS},
            "step/learner_idle_share": 1 - training / self.wall if self.wall else None,
            "step/server_busy_share": sum(server.busy_share for server in self.servers) / count if count else None,
            "step/server_in_flight": sum(server.in_flight for server in self.servers) / count if count else None,
        }

    @classmethod
    def joined(cls, times: Sequence[StepTime]) -> StepTime:
        """Return the mean over learner processes, whose parts still add up; servers work for all of them."""
        count = len(times)
        names = dict.fromkeys(server.server for time in times for server in time.servers)
        return cls(
            sum(time.wall for time in times) / count,
            {part: sum(time.parts[part] for time in times) / count for part in PARTS},
            [_together(name, [one for time in times for one in time.servers if one.server == name]) for name in names],
            sum(time.cpu for time in times) / count,
        )


def step_time(
    window: Interval, training: Sequence[Named], beside: Sequence[Named], requests: Mapping[str, Sequence[Interval]]
) -> StepTime:
    """Return the split of a step's window.

    training: spans of the thread that trains, nested or apart; beside: of other threads. requests: of each server,
    perhaps none.
    """
    ends = [at for _, *times in (*training, *beside) for at in times]
    ends += [at for times in requests.values() for interval in times for at in interval]
    edges = np.unique(np.clip([*window, *ends], *window))
    lengths = np.diff(edges)  # of the pieces between neighbouring edges; each piece belongs to one part

    names = np.full(len(lengths), "other", dtype=object)
    for name, start, end in sorted(training, key=lambda span: (span[1], -span[2])):  # inner spans paint over outer ones
        names[slice(*np.searchsorted(edges, (start, end)))] = PART_OF.get(name, "other")
    in_flight = {server: _overlaps(edges, times) for server, times in requests.items()}
    if requests:
        names[names == "generate"] = "wait"
    causes = {"generate": sum(in_flight.values(), np.zeros(len(lengths), dtype=int))}
    for part in ("encode", "match"):
        causes[part] = _overlaps(edges, [times for name, *times in beside if PART_OF.get(name) == part])
    for part, count in causes.items():
        names[(names == "wait") & (count > 0)] = part

    wall = window[1] - window[0]
    parts = {part: float(lengths[names == part].sum()) for part in PARTS}
    servers = [
        ServerTime(server, float(lengths[count > 0].sum()) / wall, float(lengths @ count) / wall)
        for server, count in in_flight.items()
    ]
    return StepTime(wall, parts, servers)


def _overlaps(edges: np.ndarray, intervals: Iterable[Sequence[float]]) -> np.ndarray:
    """Return how many of the intervals cover each piece between neighbouring edges."""
    changes = np.zeros(len(edges) + 1, dtype=int)
    for start, end in intervals:
        first, last = np.searchsorted(edges, (start, end))
        changes[first] += 1
        changes[last] -= 1
    return np.cumsum(changes)[: len(edges) - 1]


def _together(name: str, times: Sequence[ServerTime]) -> ServerTime:
    """Return one server as several processes saw it: at least as busy as the process that used it most saw it."""
    return ServerTime(name, max(one.busy_share for one in times), sum(one.in_flight for one in times))


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

    def span(self, thread: str, span: Named, figures: Mapping[str, float | None] | None = None) -> None:
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
            self._done = {server: self._done.get(server, []) for server in servers}

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
