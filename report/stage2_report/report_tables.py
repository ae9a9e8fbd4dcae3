"""The tables of a run, from its records one by one: what is kept grows with what is shown, not with the steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from rich.table import Table

from stage2_report.reward_keys import REWARD, SPREAD, reward_means

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
