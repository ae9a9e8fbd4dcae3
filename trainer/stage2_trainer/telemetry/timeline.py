"""The timeline of this process: what its threads do and which requests its servers have, and when.

There is one for the process, as there is one root logger, for there is one run in a process: whoever measures something
need not be handed it. It feeds the split of each step (`step_time`) and, where one is asked for, the trace.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter, process_time

from stage2_trainer.telemetry.intervals import Interval, Named
from stage2_trainer.telemetry.step_time import StepTime, step_time
from stage2_trainer.telemetry.trace import TraceFile


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

    def know(self, servers: Sequence[str]) -> None:
        """Forget the servers of before, and have these: one that is asked nothing counts too."""
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
        """End the step, which the calling thread has trained, and return its split."""
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
        """Note the block as a span of this thread."""
        start = perf_counter()
        try:
            yield
        finally:
            self.note(name, start)

    def note(self, name: str, start: float) -> None:
        """Note a span of this thread that began at `start` and ends now."""
        thread, span = threading.current_thread().name, (name, start, perf_counter())
        with self._lock:
            if self._open:
                self._spans.append((thread, span))
        if self.trace is not None:
            self.trace.span(thread, span)

    @contextmanager
    def request(self, server: str) -> Iterator[None]:
        """Note the block as a request that the server has."""
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
