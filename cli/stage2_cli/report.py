"""`stage2 report`: a run as a table and as a picture, from nothing but the learner's JSON lines.

The lines come from `<output_dir>/stage2_log.jsonl` or from `kubectl logs`; lines that are no records are passed over.
Pages are made in `html_report`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stage2_api.errors import ConfigError, Problem
from stage2_cli.reward_keys import REWARD, SPREAD, reward_means
from stage2_cli.run_console import parse_record
from stage2_trainer.data.output_places import check_file
from stage2_trainer.telemetry.run_log import STEP_LOG

Record = dict[str, Any]
Column = tuple[str, str, str]

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
_GRPO_COLUMNS = (
    ("loss", "loss", "{:.3f}"),
    ("reward", REWARD, "{:.3f}"),
    ("spread", SPREAD, "{:.3f}"),
    ("tokens", "completions/mean_length", "{:.0f}"),
    ("cut", "completions/clipped_ratio", "{:.2f}"),
)
_WALL = "step/wall_s"
_WHOLE = (_WALL, "step/cpu_s")  # of a step; all other seconds are its parts
_SYNC_COLUMNS = _STEP_COLUMNS[-2:]
_SCALE = {"sync/bytes": 1e-6}
_EVALUATION_COLUMNS = {
    "precision": "precision",
    "recall": "recall",
    "f1": "f1",
    "matched_maskiou_mean": "mean IoU",
    "recall_iou50": "recall@0.5",
    "f1_iou50": "f1@0.5",
    "f1_class_iou50": "with class",
    "ap": "AP",
}
_MAX_ROWS = 40
_PLAIN_WIDTH = 100  # of tables that go to a file or a pipe


def report_run(source: Path, *, picture: Path | None, images: Path | None, curve: Path | None = None) -> None:
    """Print the tables of a run; with `picture`, also draw its first and last held-out rollouts, or GRPO's rewards.

    `images` is the folder that relative image paths of the samples start from. `curve`: where loss and held-out scores
    are drawn over the steps.
    """
    for option, path in (("--picture", picture), ("--curve", curve)):
        if path is not None:
            _check_png(option, path)
    records = read_records(source)
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    steps = [record for record in records if record["event"] == "step"]
    console.print(step_table(steps))
    if any(_WALL in step for step in steps):
        console.print(time_table(steps))
    evaluations = [record for record in records if record["event"] == "evaluation"]
    if evaluations:
        console.print(evaluation_table(evaluations))
    if picture is not None:
        _draw(records, steps, picture, images)
        console.print(Text(f"picture: {picture}"), soft_wrap=True)
    if curve is not None:
        _draw_curve(steps, evaluations, curve)
        console.print(Text(f"curve: {curve}"), soft_wrap=True)


def _check_png(option: str, path: Path) -> None:
    check_file(option, path)
    if path.suffix.lower() != ".png":
        raise ConfigError(
            [Problem(option, str(path), "must end in .png", "name it so: it is written in no other form")]
        )


def reported_run(runs: Sequence[Path], *, watch: int | None) -> Path:
    """Return the log of the run that is printed. Raises ConfigError for what only a page has."""
    if len(runs) > 1 or watch is not None:
        option, value = ("--watch", f"{watch}") if watch is not None else ("RUN", f"{len(runs)} runs")
        raise ConfigError([Problem(option, value, "only a page has that", "add --html OUT.html")])
    return runs[0] / STEP_LOG if os.path.isdir(runs[0]) else runs[0]


def _draw(records: Sequence[Record], steps: Sequence[Record], picture: Path, images: Path | None) -> None:
    if _is_grpo(steps):
        _draw_curve(steps, (), picture)
        return
    from stage2_cli.report_picture import write_picture

    write_picture(records, picture, images=images)


def _draw_curve(steps: Sequence[Record], evaluations: Sequence[Record], path: Path) -> None:
    from stage2_cli.curves import write_learning_curves, write_reward_curves

    if _is_grpo(steps):
        write_reward_curves(steps, path)
    else:
        write_learning_curves(steps, evaluations, path)


def read_records(source: Path) -> list[Record]:
    """All records of a log, in order; ConfigError when there is none."""
    way_out = "give <output_dir>, its stage2_log.jsonl, or the saved output of `kubectl logs` of the learner"
    if not os.path.isfile(source):
        raise ConfigError([Problem(str(source), None, "must be an existing log", way_out)])
    with source.open(encoding="utf-8", errors="replace") as lines:
        records = [record for line in lines if (record := parse_record(line))]
    if not any(record["event"] == "step" for record in records):
        raise ConfigError([Problem(str(source), "no step record", "must hold the learner's JSON lines", way_out)])
    return records


def step_table(steps: Sequence[Record]) -> Table:
    """One row an optimizer step: loss, objects parsed, matched and missed (or GRPO's rewards), where the time went.

    Of a long run the first and last rows are shown.
    """
    columns = _reward_columns(steps[0]) if _is_grpo(steps) else _STEP_COLUMNS
    table = Table(title="Training steps", header_style="bold")
    table.add_column("step", justify="right")
    for title, _, _ in columns:
        table.add_column(title, justify="right", overflow="fold")
    half = _MAX_ROWS // 2
    shown = steps if len(steps) <= _MAX_ROWS else [*steps[:half], *steps[-half:]]
    for index, record in enumerate(shown):
        if len(steps) > _MAX_ROWS and index == half:
            table.add_row(*["…"] * (len(columns) + 1))
        table.add_row(str(record["step"]), *_cells(record, columns))
    return table


def time_table(steps: Sequence[Record]) -> Table:
    """Where the wall time of the steps went: one row for each part and for each server, as means over steps."""
    timed = [step for step in steps if _WALL in step]
    wall = fmean(step[_WALL] for step in timed)
    table = Table(title="Where the time went", header_style="bold")
    for column in ("", "s a step", "share"):
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    parts = [key for key in timed[0] if key.startswith("step/") and key.endswith("_s") and key not in _WHOLE]
    for key in parts:
        mean = fmean(step[key] for step in timed)
        table.add_row(key.removeprefix("step/").removesuffix("_s"), f"{mean:.2f}", f"{mean / wall:.0%}")
    table.add_row("whole step", f"{wall:.2f}", "100%", end_section=True)
    table.add_row("learner idle", "", f"{fmean(step['step/learner_idle_share'] for step in timed):.0%}")
    for server in dict.fromkeys(one["server"] for step in timed for one in step["servers"]):
        own = [one for step in timed for one in step["servers"] if one["server"] == server]
        in_flight = fmean(one["in_flight"] for one in own)
        name = f"{server} busy, {in_flight:.1f} requests at once"
        table.add_row(name, "", f"{fmean(one['busy_share'] for one in own):.0%}")
    return table


def _is_grpo(steps: Sequence[Record]) -> bool:
    return REWARD in steps[0]


def _reward_columns(step: Record) -> list[Column]:
    rewards = [(name.rpartition(".")[2], key, "{:.2f}") for name, key in reward_means(step).items()]
    return [*_GRPO_COLUMNS, *rewards, *_SYNC_COLUMNS]


def evaluation_table(evaluations: Sequence[Record]) -> Table:
    """One row an evaluation on the held-out records."""
    table = Table(title="Held-out records", header_style="bold")
    prefix = "eval_" if f"eval_{REWARD}" in evaluations[0] else "eval_rollout_"
    known = {REWARD: REWARD} if prefix == "eval_" else _EVALUATION_COLUMNS
    names = [name for name in known if prefix + name in evaluations[0]]  # an older log lacks some
    for title in ("step", *(known[name] for name in names)):
        table.add_column(title, justify="right")
    for record in evaluations:
        table.add_row(str(record["step"]), *(f"{record[prefix + name]:.3f}" for name in names))
    return table


def _cells(record: Record, columns: Sequence[Column]) -> list[str]:
    cells = []
    for _, key, form in columns:
        value = record.get(key)
        cells.append("" if value is None else form.format(value * _SCALE.get(key, 1)))
    return cells
