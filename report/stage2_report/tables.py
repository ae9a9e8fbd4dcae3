"""`stage2 report`: a run as tables and as a picture, from nothing but the learner's JSON lines, taken one by one.

The lines come from `<output_dir>/stage2_log.jsonl` or from `kubectl logs`; lines that are no records are passed over.
Pages are made in `html_report`, the view of a run that goes on in `live_report`.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stage2_api.errors import ConfigError, Problem
from stage2_cli.run_console import parse_record
from stage2_report.curve_points import CurvePoints
from stage2_report.run_history import REWARD, SPREAD, reward_means
from stage2_trainer.data.output_places import check_file
from stage2_trainer.telemetry.run_log import STEP_LOG

Record = Mapping[str, Any]
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
_IDLE = "step/learner_idle_share"
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


class StepRows:
    """One row an optimizer step: loss, objects parsed, matched and missed (or GRPO's rewards), where the time went.

    Of a long run the first and last rows are shown, and kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._columns: Sequence[Column] = ()
        self._first: list[list[str]] = []
        self._last: deque[list[str]] = deque(maxlen=_MAX_ROWS // 2)

    def note(self, step: Record) -> None:
        """Take a step."""
        if not self.count:
            self._columns = _reward_columns(step) if is_grpo(step) else _STEP_COLUMNS
        self.count += 1
        kept = self._first if len(self._first) < _MAX_ROWS // 2 else self._last
        kept.append([str(step["step"]), *_cells(step, self._columns)])

    def table(self) -> Table:
        """Return the table."""
        table = Table(title="Training steps", header_style="bold")
        table.add_column("step", justify="right")
        for title, _, _ in self._columns:
            table.add_column(title, justify="right", overflow="fold")
        left_out = [["…"] * (len(self._columns) + 1)] if self.count > _MAX_ROWS else []
        for row in (*self._first, *left_out, *self._last):
            table.add_row(*row)
        return table


class TimeMeans:
    """Where the wall time of the steps went: one row for each part and for each server, as means over steps."""

    def __init__(self) -> None:
        self._steps: dict[str, _Mean] = {}
        self._servers: dict[str, tuple[_Mean, _Mean]] = {}

    def note(self, step: Record) -> None:
        """Take a step; one of an older log has no times."""
        if _WALL not in step:
            return
        if not self._steps:
            parts = [key for key in step if key.startswith("step/") and key.endswith("_s") and key not in _WHOLE]
            self._steps = {key: _Mean() for key in (_WALL, *parts, _IDLE)}
        for key, mean in self._steps.items():
            mean.note(step[key])
        for one in step.get("servers", ()):  # GRPO's steps name none
            shares = self._servers.setdefault(one["server"], (_Mean(), _Mean()))
            for key, mean in zip(("busy_share", "in_flight"), shares, strict=True):
                mean.note(one[key])

    def table(self) -> Table | None:
        """Return the table; None where no step has times."""
        if not self._steps:
            return None
        means = {key: mean.value for key, mean in self._steps.items()}
        wall, idle = means.pop(_WALL), means.pop(_IDLE)
        table = Table(title="Where the time went", header_style="bold")
        for column in ("", "s a step", "share"):
            table.add_column(column, justify="left" if not column else "right", overflow="fold")
        for key, mean in means.items():
            table.add_row(key.removeprefix("step/").removesuffix("_s"), f"{mean:.2f}", f"{mean / wall:.0%}")
        table.add_row("whole step", f"{wall:.2f}", "100%", end_section=True)
        table.add_row("learner idle", "", f"{idle:.0%}")
        for server, (busy, in_flight) in self._servers.items():
            table.add_row(f"{server} busy, {in_flight.value:.1f} requests at once", "", f"{busy.value:.0%}")
        return table


class EvaluationRows:
    """One row an evaluation on the held-out records."""

    def __init__(self) -> None:
        self._keys: dict[str, str] = {}
        self._rows: list[list[str]] = []

    def note(self, evaluation: Record) -> None:
        """Take an evaluation."""
        if not self._rows:
            rewards = f"eval_{REWARD}" in evaluation
            prefix, known = ("eval_", {REWARD: REWARD}) if rewards else ("eval_rollout_", _EVALUATION_COLUMNS)
            found = {prefix + name: title for name, title in known.items()}
            self._keys = {key: title for key, title in found.items() if key in evaluation}  # an older log lacks some
        self._rows.append([str(evaluation["step"]), *(f"{evaluation[key]:.3f}" for key in self._keys)])

    def table(self) -> Table | None:
        """Return the table; None where nothing was evaluated."""
        if not self._rows:
            return None
        table = Table(title="Held-out records", header_style="bold")
        for title in ("step", *self._keys.values()):
            table.add_column(title, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


def is_grpo(step: Record) -> bool:
    """Whether a step is one of GRPO."""
    return REWARD in step


class _Mean:
    """A mean of numbers as they come, as exact as `statistics.fmean` of all of them (Shewchuk's partial sums)."""

    def __init__(self) -> None:
        self._parts: list[float] = []
        self._count = 0

    def note(self, value: float) -> None:
        self._count += 1
        parts = []
        for part in self._parts:
            larger, smaller = (value, part) if abs(value) >= abs(part) else (part, value)
            value = larger + smaller
            if lost := smaller - (value - larger):
                parts.append(lost)
        self._parts = [*parts, value]

    @property
    def value(self) -> float:
        return fsum(self._parts) / self._count


def _reward_columns(step: Record) -> list[Column]:
    rewards = [(name.rpartition(".")[2], key, "{:.2f}") for name, key in reward_means(step).items()]
    return [*_GRPO_COLUMNS, *rewards, *_SYNC_COLUMNS]


def _cells(record: Record, columns: Sequence[Column]) -> list[str]:
    cells = []
    for _, key, form in columns:
        value = record.get(key)
        cells.append("" if value is None else form.format(value * _SCALE.get(key, 1)))
    return cells


_PLAIN_WIDTH = 100  # of tables that go to a file or a pipe
_WAY_OUT = "give <output_dir>, its stage2_log.jsonl, or the saved output of `kubectl logs` of the learner"


def report_run(source: Path, *, picture: Path | None, images: Path | None, curve: Path | None = None) -> None:
    """Print the tables of a run; with `picture`, also draw its first and last held-out rollouts, or GRPO's rewards.

    `images` is the folder that relative image paths of the samples start from. `curve`: where loss and held-out scores
    are drawn over the steps.
    """
    for option, path in (("--picture", picture), ("--curve", curve)):
        if path is not None:
            _check_png(option, path)
    drawings = _Drawings(picture, curve, images)
    tables = StepRows(), TimeMeans(), EvaluationRows()
    steps, times, evaluations = tables
    takers: dict[str, Sequence[Callable[[Record], None]]] = {
        "step": (steps.note, times.note, *drawings.takers("step")),
        "evaluation": (evaluations.note, *drawings.takers("evaluation")),
        "evaluation_sample": drawings.takers("evaluation_sample"),
    }
    for record in _records(source):
        for take in takers.get(str(record["event"]), ()):
            take(record)
    if not steps.count:
        raise ConfigError([Problem(str(source), "no step record", "must hold the learner's JSON lines", _WAY_OUT)])
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    for one in tables:
        if (table := one.table()) is not None:
            console.print(table)
    for said in drawings.written():
        console.print(Text(said), soft_wrap=True)


class _Drawings:
    """The pictures that are asked for; what they do not need is not kept."""

    def __init__(self, picture: Path | None, curve: Path | None, images: Path | None) -> None:
        self._picture, self._curve, self._images = picture, curve, images
        self._points = CurvePoints()
        if picture is not None:
            from stage2_report.picture import EndSamples

            self._samples = EndSamples()

    def takers(self, event: str) -> Sequence[Callable[[Record], None]]:
        """Return what takes the records of an event."""
        if event == "evaluation_sample":
            return () if self._picture is None else (self._samples.note,)
        wanted = self._picture is not None or self._curve is not None
        note = self._points.note_step if event == "step" else self._points.note_evaluation
        return (note,) if wanted else ()

    def written(self) -> Iterator[str]:
        """Draw them, and say where each is."""
        if self._picture is not None:
            if self._points.is_grpo:
                self._draw_curves(self._picture)
            else:
                self._samples.write(self._picture, images=self._images)
            yield f"picture: {self._picture}"
        if self._curve is not None:
            self._draw_curves(self._curve)
            yield f"curve: {self._curve}"

    def _draw_curves(self, path: Path) -> None:
        from stage2_report.curves import write_curves

        write_curves(self._points, path)


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


def _records(source: Path) -> Iterator[Record]:
    """Yield the records of a log, in order; ConfigError where there is no file."""
    if not os.path.isfile(source):
        raise ConfigError([Problem(str(source), None, "must be an existing log", _WAY_OUT)])
    with source.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if record := parse_record(line):
                yield record
