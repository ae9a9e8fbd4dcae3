"""The steps of a command, each with its number of all: a spinner on a terminal, lines elsewhere."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

AGAIN_S = 60.0
"""Seconds between two lines about one step, where nobody sees a spinner."""


class Steps:
    """Announces steps. all_steps: how many there will be."""

    def __init__(self, console: Console, all_steps: int) -> None:
        self._console = console
        self._all = all_steps
        self._begun = 0

    @contextmanager
    def step(self, what: str, *, prints: bool = False) -> Iterator[None]:
        """Announce a step for the time that it takes. prints: whether it says itself how far it is."""
        self._begun += 1
        label = f"{self._begun} of {self._all}: {what}"
        if self._console.is_terminal and not prints:
            with self._console.status(label):
                yield
            return
        self._say(label)
        done = threading.Event()
        if not prints:
            threading.Thread(target=self._remind, args=(label, done), daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _remind(self, label: str, done: threading.Event) -> None:
        begun = time.monotonic()
        while not done.wait(AGAIN_S):
            self._say(f"{label}: {time.monotonic() - begun:.0f} s so far")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
