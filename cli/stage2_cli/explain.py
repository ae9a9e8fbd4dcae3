"""`stage2 explain`: why a job of the cluster does not train, and which object and field to change."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stage2_api.job import GROUP, PLURAL
from stage2_api.log_lines import one_line
from stage2_controller.report.explanation import Step, chain

_SIGNS = {"ok": "[green]ok[/]", "waits": "[yellow]waits[/]", "wrong": "[red]wrong[/]"}
TRAINS, TRAINS_NOT, UNKNOWN = 0, 1, 2


def explain_job(name: str, place: Sequence[str], *, as_json: bool) -> int:
    """Print the chain of a job that kubectl can read; 0 if nothing is missing, 1 if something is, 2 if unknown.

    place: kubectl's own options that say where the job is, and with whose rights it is read.
    """
    command = ["kubectl", "get", f"{PLURAL}.{GROUP}", name, *place, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return UNKNOWN
    return show(json.loads(done.stdout), as_json=as_json)


def show(job: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the chain of this job; 0 if nothing is missing, 1 if something is, 2 if the controller has said nothing."""
    if not (job.get("status") or {}).get("conditions"):
        sys.stderr.write(
            "no controller has looked at this job yet: is stage2 installed, and does it serve its namespace?\n"
        )
        return UNKNOWN
    steps = chain(job)
    first = next((step for step in steps if step.state != "ok"), None)
    if as_json:
        sys.stdout.write(json.dumps([vars(step) for step in steps], indent=2) + "\n")
    else:
        _print(steps, first)
    return TRAINS if first is None else TRAINS_NOT


def _print(steps: list[Step], first: Step | None) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for step in steps:
        table.add_row(step.name, _SIGNS[step.state], Text(one_line(step.message)))
    console = Console(highlight=False)
    console.print(table)
    if first is None:
        console.print("\nNothing is missing.")
        return
    missing = one_line(f"Not training because of {first.name} ({first.reason}): {first.message}")
    console.print(f"\n{missing}", soft_wrap=True, markup=False)
    if first.fix:
        console.print(f"Look at: {first.fix}", soft_wrap=True, markup=False)
