"""What this process is doing, for whoever waits for it: a line at least every 15 seconds.

Code that may take long names what it does by `ACTIVITY.doing`, with the parts of it that are done, and need not know
who listens. A command prints the lines (`stage2_cli.main`); a learner logs them and puts them into its report, from
which the controller and `stage2 run` have them (`stage2_trainer.main`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from stage2_api.log_lines import one_line

EVERY_S = 15.0
LIBRARIES = "importing PyTorch and transformers"
"""What takes seconds before a model, and most of a minute on a busy machine."""
_SECONDS = re.compile(r" \(\d+ s\)$")
_LOOKS = 20  # at the clock, in the time between two lines

Report = Callable[[str], None]
"""Receives a line; an empty one where the last line holds no longer."""


@dataclass(eq=False)
class Doing:
    """Something that is under way. what: in words. total: the number of its parts, if known. unit: what they are."""

    what: str
    total: int | None = None
    unit: str = ""
    since: float = field(default_factory=time.monotonic)
    done: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def advance(self, parts: int = 1) -> None:
        """Note that more parts are done; any thread may call it."""
        with self._lock:
            self.done += parts

    def restart(self, what: str) -> None:
        """Name something else that takes its place, such as the next step."""
        self.what, self.since = what, time.monotonic()

    def __str__(self) -> str:
        parts = "" if self.total is None else f": {self.done:,} of {self.total:,} {self.unit}".rstrip()
        return f"{self.what}{parts}"


@dataclass(eq=False)
class _Listener:
    report: Report
    due: float
    last: str = ""

    def say(self, line: str, *, due: float) -> None:
        self.due = due
        if line or self.last:
            self.last = line
            with suppress(OSError):  # standard error is closed
                self.report(line)


def without_seconds(line: str) -> str:
    """Return a line of `Activity.line` without how long it lasts.

    >>> without_seconds("generating: 3 of 32 answers (43 s)")
    'generating: 3 of 32 answers'
    """
    return _SECONDS.sub("", line)


def evaluation_name(step: int) -> str:
    """Return how the evaluation after so many steps is called.

    >>> evaluation_name(0), evaluation_name(1200)
    ('first evaluation, before training', 'evaluation at step 1,200')
    """
    return f"evaluation at step {step:,}" if step else "first evaluation, before training"


class Activity:
    """What is under way in this process, the outermost first, and who hears of it. every_s: seconds between lines."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s = every_s
        self._lock = threading.Lock()
        self._under_way: list[Doing] = []
        self._listeners: list[_Listener] = []

    @contextmanager
    def doing(self, what: str, total: int | None = None, unit: str = "") -> Iterator[Doing]:
        """Name what the block does; see `Doing`."""
        one = Doing(what, total, unit)
        self._under_way.append(one)
        try:
            yield one
        finally:
            self._under_way.remove(one)

    def line(self) -> str:
        """Return what is under way, and the seconds of the innermost; empty if nothing is."""
        under_way = list(self._under_way)
        if not under_way:
            return ""
        seconds = time.monotonic() - under_way[-1].since
        return one_line(f"{'; '.join(map(str, under_way))} ({seconds:.0f} s)")

    def said(self) -> None:
        """Note that another line, such as that of a step, has said how far this process is."""
        with self._lock:
            if self._listeners:
                self._listeners[-1].say("", due=time.monotonic() + self._every_s)

    @contextmanager
    def reported(self, report: Report, *, first_s: float | None = None) -> Iterator[None]:
        """Report within the block what takes long; an outer listener gets no lines meanwhile.

        first_s: seconds before the first line, if not those between lines.
        """
        listener = _Listener(report, time.monotonic() + (self._every_s if first_s is None else first_s))
        self._listeners.append(listener)
        ended = threading.Event()
        thread = threading.Thread(target=self._listen, args=(listener, ended), name="activity", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._listeners.remove(listener)

    def _listen(self, listener: _Listener, ended: threading.Event) -> None:
        while not ended.wait(self._every_s / _LOOKS):
            with self._lock:
                if listener is self._listeners[-1] and (now := time.monotonic()) >= listener.due:
                    line = self.line()
                    listener.say(line, due=now + self._every_s if line else now)


ACTIVITY = Activity()
"""What this process is doing."""
