"""Processes that stand in for containers: started with their own log file and process group, ended as a group.

A child asks the kernel to end it when the executor dies (PR_SET_PDEATHSIG): not even `kill -9` leaves servers behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; for the child's side of a fork."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass
class LocalProcess:
    """One container as a process.

    name: as in the plan (`server-0`, `learner`); log: where its output is appended.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Start it with nothing of this process's environment but what PATH-like variables must pass on."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                list(self.command),
                env=dict(self.env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit status, or None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def stop(self, *, grace_s: float = 15.0) -> None:
        """TERM to the whole group, then KILL after `grace_s` seconds."""
        if self.process is None:
            return
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._group_alive() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        if not self.log.exists():
            return ""
        with self.log.open(encoding="utf-8", errors="replace") as text:
            return "".join(deque(text, maxlen=lines))

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        if self._group_alive():
            os.killpg(self.process.pid, number)

    def _group_alive(self) -> bool:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True
