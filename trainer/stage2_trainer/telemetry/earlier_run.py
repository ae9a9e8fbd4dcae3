"""The earlier run of an output folder: its checkpoints, its logs, its trace, and how they are removed."""

from __future__ import annotations

import shutil
from pathlib import Path

from stage2_trainer.process.checkpoints import MARK, PREFIX, UNFINISHED, UNPROVED, checkpoints_of
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG, STEP_LOG
from stage2_trainer.telemetry.trace import TRACE_FILE

DUMPS = "monitor_dumps"  # of `monitor_dump`, where it names no other folder


def remove_run(folder: Path) -> list[Path]:
    """Remove what a run has written, and nothing else; return what it was."""
    logs = [
        folder / MARK,
        folder / STEP_LOG,
        *(file for name in (ROLLOUT_LOG, TRACE_FILE) for file in sorted(folder.glob(f"*{name}"))),
    ]
    checkpoints = (*checkpoints_of(folder), *sorted(folder.glob(f"{UNPROVED}{PREFIX}*")), folder / UNFINISHED)
    removed = [one for one in (*checkpoints, folder / DUMPS, *logs) if one.exists()]
    for one in removed:
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink()
    return removed
