"""Stopping early without losing a step: SIGTERM asks, and the trainer stops where nothing is half done.

A run of one process stops at once wherever weights do not change: while it loads, waits for servers, pushes weights,
waits for rollouts, evaluates, or computes gradients. One of several that left a collective call alone would hang the
others, so they stop together: before their next micro-step or row, at the next token of the answers that they make, or
where all wait for what the first one does. While they load, each leaves at once: there is nothing to save.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Interrupted(BaseException):
    """The run was asked to stop; what it has learnt so far is whole, and it can go on from a checkpoint.

    No Exception, as KeyboardInterrupt is none: it can be raised anywhere in a `stoppable` block, and what handles the
    failures of a server there must not take it for one.
    """


class Interrupt:
    """A request to stop, set by SIGTERM. processes: of this learner."""

    def __init__(self, processes: int = 1) -> None:
        self._alone = processes == 1
        self._asked = False  # no Event: its lock is held while a second signal would ask for it, in the same thread
        self._at_once = False
        self._group: ProcessGroup | None = None

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop; others perhaps were not yet."""
        return self._asked

    def listen(self) -> None:
        """Take SIGTERM as the request. Call it from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self) -> None:
        """Ask the run to stop."""
        self._asked = True

    def check(self) -> None:
        """Raise Interrupted if the run was asked to stop, in all learner processes at once when one of them was."""
        # torch: SIGTERM is listened to before it is imported
        from stage2_trainer.process.ranks import gathered, host_group

        if self._group is None:
            self._group = host_group()
        if any(gathered(self._asked, self._group)):
            raise Interrupted("asked to stop (SIGTERM)")

    def hold(self) -> None:
        """Let SIGTERM wait for the end of the `stoppable` block: what follows in it changes weights."""
        self._at_once = False

    @contextmanager
    def stoppable(self, *, others_wait: bool = False, nothing_to_save: bool = False) -> Iterator[None]:
        """Let SIGTERM end the block where it is, by Interrupted, in a learner of one process.

        The block runs in the main thread and leaves nothing half done that a checkpoint holds. others_wait: in one of
        several processes too, since the others wait to be told what came of it. nothing_to_save: in each of several
        too, for it may leave alone; the launcher ends the others.
        """
        before, self._at_once = self._at_once, self._alone or others_wait or nothing_to_save
        try:
            if self._at_once and self._asked:
                raise Interrupted("asked to stop (SIGTERM)")
            yield
        finally:
            self._at_once = before and not self._asked  # a second signal disturbs no clearing away

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._asked = True
        if self._at_once:
            self._at_once = False  # what the exception leaves behind is cleared away undisturbed
            raise Interrupted("asked to stop (SIGTERM)")
