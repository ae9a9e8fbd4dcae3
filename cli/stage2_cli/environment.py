"""`stage2 env`: what a bug report says about a machine."""

from __future__ import annotations

import os
import platform
from typing import Any

from stage2_cli.commit import built_from
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.checks.packages import versions_of_extras
from stage2_trainer.checks.resources import GIB, Machine
from stage2_trainer.process.cuda_driver import VISIBLE_VARIABLE

VARIABLES = (VISIBLE_VARIABLE, "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Environment variables that change runs and hold no secrets."""


def environment() -> dict[str, Any]:
    """Return versions, hardware, and the variables of `VARIABLES` that are set. Sizes in GiB."""
    machine, packages = Machine.detect(), versions_of_extras()
    return {
        "stage2": packages.pop("stage2"),
        "commit": built_from(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "memory_free_gib": round(machine.memory / GIB, 1),
        "shared_memory_free_gib": round(machine.shared_memory / GIB, 1),
        "nvidia_driver": machine.driver,
        "gpus": [f"{gpu.name}, {gpu.total / GIB:.0f} GiB" for gpu in machine.gpus],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": packages,
    }


def show_environment(*, as_json: bool = False) -> int:
    """Print it as lines for a bug report; returns 0."""
    found = environment()
    if as_json:
        print_json(found)
        return 0
    terminal = Terminal()
    packages = found.pop("packages")
    rows = found | {
        "gpus": "; ".join(found["gpus"]),
        "variables": " ".join(f"{name}={value}" for name, value in found["variables"].items()),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "not installed": ", ".join(name for name, version in packages.items() if not version),
    }
    for name, value in rows.items():
        terminal.print(f"{name.replace('_gib', ', GiB').replace('_', ' ')}: {value or 'none'}")
    return 0
