"""Wall seconds of a step by the name of what they went to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from stage2_trainer.telemetry.timeline import TIMELINE


class Stopwatch:
    """Seconds by name, summed over the micro-steps of an optimizer step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to `name`, and note it on the process's timeline."""
        start = perf_counter()
        with TIMELINE.measure(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def add(self, other: Stopwatch) -> None:
        """Add the seconds of another one."""
        for name, seconds in other.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
