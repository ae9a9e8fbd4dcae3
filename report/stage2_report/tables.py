"""`stage2 report RUN`: the tables of a run, and a picture of its held-out rollouts.

Each record of the log is used once and dropped: what stays in memory grows with what is shown, not with the steps.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.table import Table

from stage2_api.errors import ConfigError, refused
from stage2_report.run_history import (
    REWARD,
    SPREAD,
    WAY_OUT,
    EvaluatedRun,
    Record,
    SetAside,
    find_log,
    folder_of_images,
    read_records,
    reward_means,
)
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.data.files import check_file
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.wire.requests import DraftCounts

_PLAIN_WIDTH = 100  # of tables in a file or a pipe
_END_ROWS = 20
"""How many of the first and of the last steps are shown."""

Column = tuple[str, str, str]
"""Title, key of the record and number format."""

_SYNC_COLUMNS = (("sync s", "sync/seconds", "{:.2f}"), ("sync MB", "sync/bytes", "{:.1f}"))
_STEP_COLUMNS = (
    ("loss", "loss", "{:.3f}"),
    ("parsed", "rollout/valid_pred_objects", "{:.0f}"),
    ("matched", "rollout/matched_maskiou_count", "{:.0f}"),
    ("following", "rollout/following", "{:.0f}"),
    ("missed", "rollout/fn", "{:.0f}"),
    ("roll s", "time/rollout_generate_s", "{:.2f}"),
    ("fwd s", "time/forward_s", "{:.2f}"),
    *_SYNC_COLUMNS,
)
_GRPO_COLUMNS = (
    ("loss", "loss", "{:.3f}"),
    ("reward", REWARD, "{:.3f}"),
    ("spread", SPREAD, "{:.3f}"),
    ("tokens", "completions/mean_length", "{:.0f}"),
    ("cut", "completions/clipped_ratio", "{:.2f}"),
)
_SCALE = {"sync/bytes": 1e-6}
_WALL, _CPU, _IDLE = "step/wall_s", "step/cpu_s", "step/learner_idle_share"
_EVALUATION_COLUMNS = {
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "matched_maskiou_mean": "mean IoU",
    "recall_iou50": "recall, IoU 0.5",
    "f1_iou50": "F1, IoU 0.5",
    "f1_class_iou50": "F1 with class",
    "ap": "AP",
}
_OF_MATCHING = ": figures of training's matching, but for F1 with class and AP"


def report_runs(runs: Sequence[Path], *, picture: Path | None = None, images: Path | None = None) -> None:
    """Print the tables of each run; with `picture`, also draw the held-out rollouts of one or two runs into this PNG.

    images: the folder in which the samples' images are found by name. Raises ConfigError.
    """
    if picture is not None:
        check_file("--picture", picture)
        if picture.suffix.lower() != ".png":
            raise refused("--picture", str(picture), "must end in .png", "only PNG is written")
    console = Terminal(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, wraps=True)
    evaluated = []
    for run in runs:
        if len(runs) > 1:
            console.print(f"{run}:", soft_wrap=True)
        evaluated.append(_report_run(run, console))
    if picture is not None:
        from stage2_report.picture import write_held_out  # the tables need no Pillow and no SciPy

        with ACTIVITY.doing(f"drawing {picture}"):
            write_held_out(evaluated, picture, images=images or folder_of_images(*map(find_log, runs)))
        console.print(f"picture: {picture}", soft_wrap=True)


def print_records(runs: Sequence[Path]) -> None:
    """Print the records of steps, evaluations and bad samples as JSON lines, each with its `run`. Raises ConfigError.

    A saved log has other lines too, which are left out.
    """
    for run in runs:
        log, steps = find_log(run), 0
        for record in read_records(log):
            steps += record["event"] == "step"
            if record["event"] in ("step", "evaluation", "bad_sample"):
                print_json({"run": str(run), **record})
        if not steps:
            raise _without_steps(log)


def _without_steps(log: Path) -> ConfigError:
    return refused(str(log), "no step record", "must hold the learner's JSON lines", WAY_OUT)


def _report_run(run: Path, console: Terminal) -> EvaluatedRun:
    """Print the tables of a run; return where its held-out answers are."""
    log = find_log(run)
    steps, times, drafts, evaluations = StepRows(), TimeMeans(), DraftSums(), EvaluationRows()
    set_aside = SetAside()
    readers: dict[str, Sequence[Callable[[Record], None]]] = {
        "step": (steps.add, times.add, drafts.add),
        "evaluation": (evaluations.add,),
        "bad_sample": (set_aside.add,),
    }
    for record in read_records(log):
        for add in readers.get(record["event"], ()):
            add(record)
    if not steps.count:
        raise _without_steps(log)
    for table in (steps.table(), times.table(), drafts.table(), evaluations.table()):
        if table is not None:
            console.print(table)
    if text := str(set_aside):
        console.print(text, soft_wrap=True)
    return EvaluatedRun(run.name, log, sorted(evaluations.steps))


class StepRows:
    """One row for each optimizer step: loss, objects parsed, matched and missed (or GRPO's rewards), and times.

    Of a long run only the first and the last rows are kept and shown.
    """

    def __init__(self) -> None:
        self.count = 0
        self._columns: Sequence[Column] = ()
        self._first: list[list[str]] = []
        self._last: deque[list[str]] = deque(maxlen=_END_ROWS)

    def add(self, step: Record) -> None:
        """Add a step; the first decides which columns there are."""
        if not self.count:
            self._columns = _reward_columns(step) if REWARD in step else _STEP_COLUMNS
        self.count += 1
        rows = self._first if len(self._first) < _END_ROWS else self._last
        rows.append([str(step["step"]), *(_cell(step.get(key), key, form) for _, key, form in self._columns)])

    def table(self) -> Table:
        """Return the table."""
        gap = [["…"] * (len(self._columns) + 1)] if self.count > 2 * _END_ROWS else []
        titles = [title for title, _, _ in self._columns]
        return _right_aligned("Training steps", ["step", *titles], [*self._first, *gap, *self._last])


class TimeMeans:
    """Where the wall time of the steps went, one row for each part and for each server.

    Seconds are means over steps, and shares are of the whole time: a long step counts as much as it took.
    """

    def __init__(self) -> None:
        self._count = 0
        self._sums: dict[str, float] = {}
        self._idle = 0.0  # seconds
        self._servers: dict[str, tuple[float, float, float]] = {}  # seconds: known, busy, in flight times requests

    def add(self, step: Record) -> None:
        """Add a step; steps of older logs have no times."""
        wall = step.get(_WALL)
        if not wall:
            return
        if not self._count:
            parts = [key for key in step if key.startswith("step/") and key.endswith("_s") and key not in (_WALL, _CPU)]
            self._sums = dict.fromkeys((_WALL, *parts), 0.0)
        self._count += 1
        for key in self._sums:
            self._sums[key] += step[key]
        self._idle += step[_IDLE] * wall
        for one in step.get("servers", ()):  # GRPO's steps name none
            known, busy, in_flight = self._servers.get(one["server"], (0.0, 0.0, 0.0))
            self._servers[one["server"]] = (
                known + wall, busy + one["busy_share"] * wall, in_flight + one["in_flight"] * wall
            )  # fmt: skip

    def table(self) -> Table | None:
        """Return the table; None where no step has times."""
        if not self._count:
            return None
        means = {key: total / self._count for key, total in self._sums.items()}
        wall, idle = means.pop(_WALL), self._idle / self._sums[_WALL]
        table = Table(title="Where the time went", header_style="bold")
        for column in ("", "s a step", "share"):
            table.add_column(column, justify="left" if not column else "right", overflow="fold")
        for key, mean in means.items():
            table.add_row(key.removeprefix("step/").removesuffix("_s"), f"{mean:.2f}", f"{mean / wall:.0%}")
        table.add_row("whole step", f"{wall:.2f}", "100%", end_section=True)
        table.add_row("learner idle", "", f"{idle:.0%}")
        for server, (known, busy, in_flight) in self._servers.items():
            table.add_row(f"{server} busy, {in_flight / known:.1f} requests at once", "", f"{busy / known:.0%}")
        return table


class DraftSums:
    """What drafts did at each server, over all steps: a column for each server that drafted."""

    def __init__(self) -> None:
        self._servers: list[DraftCounts] = []

    def add(self, step: Record) -> None:
        """Add a step; one that reuses rollouts repeats the counts of the step that they were generated for."""
        if step.get("rollout/buffer_reuse"):
            return
        counts = [
            DraftCounts(one["server"], one["tokens"], one["drafted"], one["accepted"], tuple(one["verified"]))
            for one in step.get("drafts", ())
            if "tokens" in one  # logs of an earlier version have only the rates
        ]
        self._servers = DraftCounts.joined([*self._servers, *counts])

    def table(self) -> Table | None:
        """Return the table; None where nothing was drafted."""
        figures = [one.figures() for one in self._servers if one.drafted]
        if not figures:
            return None
        by_position = [one["accepted_by_position"] or () for one in figures]
        positions = [
            [f"of drafts, first {position} accepted", *("" if share is None else f"{share:.0%}" for share in shares)]
            for position, shares in enumerate(zip_longest(*by_position), start=1)
        ]
        rows = [
            ["decode steps for each token", *(f"{one['decode_steps_per_token']:.3f}" for one in figures)],
            ["of drafted tokens, accepted", *(f"{one['draft_acceptance_rate']:.0%}" for one in figures)],
            *positions,
        ]
        return _right_aligned("Drafts", ["", *(one["server"] for one in figures)], rows)


class EvaluationRows:
    """One row for each evaluation on the held-out records."""

    def __init__(self) -> None:
        self.steps: set[int] = set()  # those whose answers were matched
        self._keys: dict[str, str] = {}
        self._rows: list[list[str]] = []

    def add(self, evaluation: Record) -> None:
        """Add an evaluation; the first decides which columns there are, because older logs lack some."""
        if not self._rows:
            rewards = f"eval_{REWARD}" in evaluation
            prefix, known = ("eval_", {REWARD: REWARD}) if rewards else ("eval_rollout_", _EVALUATION_COLUMNS)
            self._keys = {prefix + name: title for name, title in known.items() if prefix + name in evaluation}
        if "eval_rollout_f1" in evaluation:
            self.steps.add(evaluation["step"])
        self._rows.append([str(evaluation["step"]), *(_cell(evaluation.get(key), key, "{:.3f}") for key in self._keys)])

    def table(self) -> Table | None:
        """Return the table; None where nothing was evaluated."""
        title = f"Held-out records{_OF_MATCHING if self.steps else ''}"
        return _right_aligned(title, ["step", *self._keys.values()], self._rows) if self._rows else None


def _reward_columns(step: Record) -> list[Column]:
    rewards = [(name.rpartition(".")[2], key, "{:.2f}") for name, key in reward_means(step).items()]
    return [*_GRPO_COLUMNS, *rewards, *_SYNC_COLUMNS]


def _cell(value: float | None, key: str, form: str) -> str:
    return "" if value is None else form.format(value * _SCALE.get(key, 1))


def _right_aligned(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
