"""Requests to a cluster, all through kubectl, with its context, namespace and credentials."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import IO

from stage2_api.log_lines import one_line, without_colours

PATIENCE = "--request-timeout=20s"  # kubectl itself waits for minutes where no server answers
LONGEST_LINE = 1 << 20  # bytes of a log's line that is kept in memory; a longer one becomes several
STDOUT = 1
_NOT_FOUND = 127  # a shell's exit code for a missing command


def kubectl(
    words: Sequence[str],
    *,
    stdout: IO[bytes] | int | None = None,
    on_output: Callable[[IO[bytes]], None] | None = None,
) -> tuple[int, str, str]:
    """Run kubectl; return its exit code, its output where `stdout` is a pipe, and the last line of its errors.

    Where no server answers, that line says so, and those before it repeat a library's log. on_output: reads the output
    while kubectl runs.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["kubectl", *words], stdout=stdout if on_output is None else subprocess.PIPE, stderr=errors
            )
        except FileNotFoundError:
            return _NOT_FOUND, "", "it is not installed"
        with process:
            if on_output is not None and process.stdout is not None:
                on_output(process.stdout)
            output, _ = process.communicate()
        errors.seek(0)
        last = (errors.read().decode(errors="replace").splitlines() or [""])[-1]
    return process.returncode, (output or b"").decode(errors="replace"), last


def print_lines(log: IO[bytes]) -> None:
    """Print the lines of a log while they come, without colours, and with what a terminal would obey escaped.

    Each state of a progress bar, which a carriage return begins, is a line.
    """
    try:
        with open(STDOUT, "w", encoding="utf-8", closefd=False) as output:
            for line in iter(lambda: log.readline(LONGEST_LINE), b""):
                text = line.decode(errors="backslashreplace").removesuffix("\n").removesuffix("\r")
                output.writelines(f"{one_line(without_colours(state))}\n" for state in text.split("\r"))
                output.flush()
    except BrokenPipeError:  # `stage2 logs | head`
        log.close()
