"""`stage2 job explain`: why a job in the cluster is not training, and which object and field to change."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from stage2_api.errors import EXIT_FAILURE
from stage2_api.log_lines import print_error
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_report.terminal import Terminal, print_json

_STYLES = {"ok": "green", "waits": "yellow", "wrong": "red"}


def show(job: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the steps of this job; return 0 if it trains, else EXIT_FAILURE."""
    if not (job.get("status") or {}).get("conditions"):
        print_error("no controller has reconciled this job yet: is stage2 installed, and does it watch this namespace?")
        return EXIT_FAILURE
    steps = explanation.chain(job)
    first = explanation.first(steps)
    code = os.EX_OK if first.state == "ok" else EXIT_FAILURE
    if as_json:
        print_json([vars(step) for step in steps], indent=2)
        return code
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for step in steps:
        table.add_row(step.name, Text(step.state, _STYLES[step.state]), step.message)
    Terminal(wraps=True).print(table)
    console = Terminal()
    console.print()
    if code == os.EX_OK:
        console.print("Nothing is missing.")
        return code
    trains = (conditions.find(job["status"], reasons.TRAINING) or {}).get("status") == "True"
    lead = "It trains on, but look at" if trains else "Not training because of"
    console.print(f"{lead} {first.name} ({first.reason}): {first.message}")
    if first.fix:
        console.print(f"Look at: {first.fix}")
    return code
