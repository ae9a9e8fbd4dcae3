"""`stage2 report`: a run as a table and as a picture, from nothing but the learner's JSON lines.

The lines come from `<output_dir>/stage2_log.jsonl` or from `kubectl logs`; lines that are no records are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stage2_api.errors import ConfigError, Problem
from stage2_cli.progress import parse_record

Record = dict[str, Any]

_STEP_COLUMNS = (
    ("loss", "loss", "{:.3f}"),
    ("parsed", "rollout/valid_pred_objects", "{:.0f}"),
    ("matched", "rollout/matched_for_supervision", "{:.0f}"),
    ("missed", "rollout/fn_appended", "{:.0f}"),
    ("roll s", "time/rollout_generate_s", "{:.2f}"),
    ("fwd s", "time/forward_s", "{:.2f}"),
    ("sync s", "sync/seconds", "{:.2f}"),
    ("sync MB", "sync/bytes", "{:.1f}"),
)
_SCALE = {"sync/bytes": 1e-6}
_EVALUATION_COLUMNS = ("precision", "recall", "f1", "matched_maskiou_mean", "recall_iou50", "f1_iou50")
_MAX_ROWS = 40
_PLAIN_WIDTH = 100  # of tables that go to a file or a pipe


def report_run(source: Path, *, picture: Path | None, images: Path | None) -> None:
    """Print the tables of a run; with `picture`, also draw its first and last held-out rollouts.

    `images` is the folder that relative image paths of the samples start from.
    """
    records = read_records(source)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(step_table([record for record in records if record["event"] == "step"]))
    evaluations = [record for record in records if record["event"] == "evaluation"]
    if evaluations:
        console.print(evaluation_table(evaluations))
    if picture is not None:
        from stage2_cli.picture import write_picture

        write_picture(records, picture, images=images)
        console.print(f"picture: {picture}")


def read_records(source: Path) -> list[Record]:
    """All records of a log, in order; ConfigError when there is none."""
    with source.open(encoding="utf-8", errors="replace") as lines:
        records = [record for line in lines if (record := parse_record(line))]
    if not any(record["event"] == "step" for record in records):
        way_out = "give <output_dir>/stage2_log.jsonl or the saved output of `kubectl logs` of the learner"
        raise ConfigError([Problem(str(source), "no step record", "must hold the learner's JSON lines", way_out)])
    return records


def step_table(steps: Sequence[Record]) -> Table:
    """One row an optimizer step: loss, objects parsed, matched and missed, and where the time went.

    Of a long run the first and last rows are shown.
    """
    table = Table(title="Training steps", header_style="bold")
    table.add_column("step", justify="right")
    for title, _, _ in _STEP_COLUMNS:
        table.add_column(title, justify="right")
    half = _MAX_ROWS // 2
    shown = steps if len(steps) <= _MAX_ROWS else [*steps[:half], *steps[-half:]]
    for index, record in enumerate(shown):
        if len(steps) > _MAX_ROWS and index == half:
            table.add_row(*["…"] * (len(_STEP_COLUMNS) + 1))
        table.add_row(str(record["step"]), *_cells(record))
    return table


def evaluation_table(evaluations: Iterable[Record]) -> Table:
    """One row an evaluation on the held-out records."""
    table = Table(title="Held-out records", header_style="bold")
    for name in ("step", *_EVALUATION_COLUMNS):
        table.add_column(name.replace("matched_maskiou_mean", "mean IoU").replace("_iou50", "@0.5"), justify="right")
    for record in evaluations:
        values = (record[f"eval_rollout_{name}"] for name in _EVALUATION_COLUMNS)
        table.add_row(str(record["step"]), *(f"{value:.3f}" for value in values))
    return table


def _cells(record: Record) -> list[str]:
    cells = []
    for _, key, form in _STEP_COLUMNS:
        value = record.get(key)
        cells.append("" if value is None else form.format(value * _SCALE.get(key, 1)))
    return cells
