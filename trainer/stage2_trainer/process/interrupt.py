"""Stopping early without losing a step: after a SIGTERM the trainer stops where nothing is half done.

A run of one process stops at once wherever weights do not change: while it loads, waits for servers, pushes weights,
waits for rollouts, evaluates, or computes gradients. Of several processes, one that left a collective call alone would
hang the others. So they stop together: before their next micro-step or row, at the next token of the answers that they
generate, or where all wait for the first one. While they load, each leaves at once: there is nothing to save.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REASON = "asked to stop (SIGTERM)"


class Interrupted(BaseException):
    """The run was asked to stop. What it has learnt so far is whole, and it can resume from a checkpoint.

    Like KeyboardInterrupt it is no Exception: it can be raised anywhere in a `stoppable` block, and code there that
    handles the failures of a server must not catch it.
    """


class Interrupt:
    """A request to stop, set by SIGTERM. processes: the number of processes of this learner."""

    def __init__(self, processes: int = 1) -> None:
        self._alone = processes == 1
        self._requested = False  # no Event: a second signal would wait for its lock in the thread that holds it
        self._at_once = False
        self._group: ProcessGroup | None = None

    @property
    def requested(self) -> bool:
        """Whether this process was asked to stop; others may not have been yet."""
        return self._requested

    def listen(self) -> None:
        """Handle SIGTERM as the request. Call it from the main thread."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def request(self) -> None:
        """Request a stop."""
        self._requested = True

    def check(self) -> None:
        """Raise Interrupted in all learner processes at once, if any of them was asked to stop."""
        # torch: SIGTERM is handled before it is imported
        from stage2_trainer.process.ranks import gathered, host_group

        if self._group is None:
            self._group = host_group()
        if any(gathered(self._requested, self._group)):
            raise Interrupted(_REASON)

    def hold(self) -> None:
        """Delay SIGTERM until the end of the `stoppable` block: what follows in it changes weights."""
        self._at_once = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay SIGTERM until the end of this block, where other processes take part in what it does."""
        before, self._at_once = self._at_once, False
        try:
            yield
        finally:
            self._at_once = before
        if before and self._requested:
            self._at_once = False  # the exception's clean-up runs undisturbed
            raise Interrupted(_REASON)

    @contextmanager
    def stoppable(self, *, others_wait: bool = False, nothing_to_save: bool = False) -> Iterator[None]:
        """Let SIGTERM end the block at once by Interrupted, in a learner of one process.

        The block runs in the main thread and leaves nothing half done that a checkpoint holds. others_wait: also in one
        of several processes, because the others wait for its result. nothing_to_save: also in each of several, because
        it may leave alone; the launcher ends the others.
        """
        before, self._at_once = self._at_once, self._alone or others_wait or nothing_to_save
        try:
            if self._at_once and self._requested:
                raise Interrupted(_REASON)
            yield
        finally:
            self._at_once = before and not self._requested  # a second signal does not disturb the clean-up

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._requested = True
        if self._at_once:
            self._at_once = False  # the exception's clean-up runs undisturbed
            raise Interrupted(_REASON)
