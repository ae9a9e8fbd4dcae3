"""`stage2 explain`: why a job in the cluster is not training, and which object and field to change."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from stage2_api.job import GROUP, PLURAL
from stage2_api.log_lines import print_error
from stage2_cli.kubectl import PATIENCE, kubectl
from stage2_controller.report import explanation
from stage2_controller.state import conditions, reasons
from stage2_report.terminal import Terminal, print_json

_STYLES = {"ok": "green", "waits": "yellow", "wrong": "red"}
_TRAINS, _WAITS, _UNKNOWN = 0, 1, 2
"""Exit codes."""


def explain_job(name: str, options: Sequence[str], *, as_json: bool) -> int:
    """Print the steps of a job up to training; return 0 if it trains, 1 if it waits, 2 if its state is unknown.

    options: kubectl's options for namespace, context and user.
    """
    words = ["get", f"{PLURAL}.{GROUP}", name, *options, PATIENCE, "--output=json"]
    code, found, error = kubectl(words, stdout=subprocess.PIPE)
    if code:
        print_error(f"kubectl cannot read {name} from a cluster: {error}")
        return _UNKNOWN
    return show(json.loads(found), as_json=as_json)


def show(job: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the steps of this job; return 0, 1 or 2 as `explain_job`."""
    if not (job.get("status") or {}).get("conditions"):
        print_error("no controller has reconciled this job yet: is stage2 installed, and does it watch this namespace?")
        return _UNKNOWN
    steps = explanation.chain(job)
    first = explanation.first(steps)
    code = _TRAINS if first.state == "ok" else _WAITS
    if as_json:
        print_json([vars(step) for step in steps], indent=2)
        return code
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for step in steps:
        table.add_row(step.name, Text(step.state, _STYLES[step.state]), step.message)
    Terminal(wraps=True).print(table)
    console = Terminal()
    console.print()
    if code == _TRAINS:
        console.print("Nothing is missing.")
        return code
    trains = (conditions.find(job["status"], reasons.TRAINING) or {}).get("status") == "True"
    lead = "It trains on, but look at" if trains else "Not training because of"
    console.print(f"{lead} {first.name} ({first.reason}): {first.message}")
    if first.fix:
        console.print(f"Look at: {first.fix}")
    return code
