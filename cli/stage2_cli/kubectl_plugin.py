"""`kubectl stage2 VERB`: the commands of `stage2 job`. kubectl finds this program as `kubectl-stage2`.

For the completion of its words kubectl calls `kubectl_complete-stage2`.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import redirect_stdout, suppress
from io import StringIO

import typer

from stage2_cli.jobs import jobs
from stage2_cli.main import call

_NO_FILES = ":4"
"""Tells kubectl that names of files are no completions."""


def main() -> None:
    """Entry point of the plugin."""
    call(jobs)


def complete() -> None:
    """Entry point of its completion: print what the last argument may become, as kubectl reads it."""
    *words, incomplete = sys.argv[1:] or [""]
    os.environ |= {  # fish reads the same lines as kubectl
        "_KUBECTL_STAGE2_COMPLETE": "complete_fish",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": f"{shlex.join(['kubectl-stage2', *words])} {incomplete}",
    }
    with redirect_stdout(StringIO()) as completions, suppress(SystemExit):
        jobs(prog_name="kubectl-stage2")
    for line in (*filter(None, completions.getvalue().splitlines()), _NO_FILES):
        typer.echo(line)
