"""How long a test waits before it fails: longer where the machine has more to do than it has cores."""

from __future__ import annotations

import os
import time


class Patience:
    """A deadline that runs down at a rate that follows the load: at twice as many tasks as cores, half as fast.

    timeout_s: the time on an idle machine.
    """

    def __init__(self, timeout_s: float) -> None:
        self._left_s = timeout_s
        self._began = self._last = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds of wall time since it began."""
        return time.monotonic() - self._began

    def ended(self) -> bool:
        """Return whether the time is over; call it repeatedly while you wait."""
        now = time.monotonic()
        self._left_s -= (now - self._last) / crowding()
        self._last = now
        return self._left_s <= 0


def crowding() -> float:
    """Return tasks that want to run in the last minute for each core of this machine, 1 where there are fewer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
