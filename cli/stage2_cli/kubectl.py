"""Requests to a cluster, all through kubectl, with its context, namespace and credentials."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import IO

PATIENCE = "--request-timeout=20s"  # kubectl itself waits for minutes where no server answers
_NOT_FOUND = 127  # a shell's exit code for a missing command


def kubectl(words: Sequence[str], *, stdout: IO[bytes] | int | None = None) -> tuple[int, str, str]:
    """Run kubectl; return its exit code, its output where `stdout` is a pipe, and the last line of its errors.

    Where no server answers, that line says so, and those before it repeat a library's log.
    """
    try:
        done = subprocess.run(["kubectl", *words], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    except FileNotFoundError:
        return _NOT_FOUND, "", "it is not installed"
    return done.returncode, done.stdout or "", (done.stderr.splitlines() or [""])[-1]
