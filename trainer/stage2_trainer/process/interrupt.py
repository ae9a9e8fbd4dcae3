"""Stopping early without losing a step: SIGTERM asks, the trainer stops before its next micro-step."""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(RuntimeError):
    """The run was asked to stop; what it has learnt so far is whole, and it can go on from a checkpoint."""


class Interrupt:
    """A request to stop, set by SIGTERM and looked at between micro-steps."""

    def __init__(self) -> None:
        self._asked = False  # no Event: its lock is held while a second signal would ask for it, in the same thread

    def listen(self) -> None:
        """Take SIGTERM as the request. Call it from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self) -> None:
        """Ask the run to stop."""
        self._asked = True

    def check(self) -> None:
        """Raise Interrupted if the run was asked to stop, in all learner processes at once when one of them was."""
        from stage2_trainer.process.ranks import gathered  # torch: SIGTERM is listened to before it is imported

        if any(gathered(self._asked)):
            raise Interrupted("asked to stop (SIGTERM)")

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True
