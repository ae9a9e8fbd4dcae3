"""torchrun's processes, ended without cutting a checkpoint off, by what torch 2.13 calls internally.

When one of them fails torchrun asks the others to end, and kills them 30 s later: `SubprocessContext._poll` closes with
the default of `close`, whatever `--shutdown-timeout` says. No upstream issue found. Goes when that option, or another
one, is heeded there, and a save can hold the kill off.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

LOOKED_EVERY_S = 0.1


class _PatientContext(SubprocessContext):
    """Processes that are killed when none of them has been busy for a time since they were asked to end."""

    def __init__(self, *args: Any, busy: Callable[[], bool], longest_hang_s: int, **kwargs: Any) -> None:
        self._busy = busy
        self._longest_hang_s = longest_hang_s
        super().__init__(*args, **kwargs)

    def close(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        super().close(death_sig, self._longest_hang_s if timeout is None else timeout)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        for handler in self._running():
            handler.close(death_sig=death_sig)
        end = time.monotonic() + timeout
        while self._running() and time.monotonic() < end:
            if self._busy():
                end = time.monotonic() + timeout  # what follows, to its exit, gets its time too
            time.sleep(LOOKED_EVERY_S)
        super()._close(signal.SIGKILL, timeout)

    def _running(self) -> list[Any]:
        return [one for one in self.subprocess_handlers.values() if one.proc.poll() is None]


@contextmanager
def patient_ends(busy: Callable[[], bool], longest_hang_s: int) -> Iterator[None]:
    """Have torchrun leave processes alone while `busy` says so, and kill them `longest_hang_s` seconds after that."""
    multiprocessing.SubprocessContext = partial(  # type: ignore[assignment,misc]
        _PatientContext, busy=busy, longest_hang_s=longest_hang_s
    )
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = SubprocessContext  # type: ignore[misc]
