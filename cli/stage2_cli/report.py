"""`stage2 report`: a run as tables and as a picture, from nothing but the learner's JSON lines, taken one by one.

The lines come from `<output_dir>/stage2_log.jsonl` or from `kubectl logs`; lines that are no records are passed over.
Pages are made in `html_report`, the view of a run that goes on in `live_report`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from stage2_api.errors import ConfigError, Problem
from stage2_cli.run_console import parse_record
from stage2_report.curve_points import CurvePoints
from stage2_report.report_tables import EvaluationRows, StepRows, TimeMeans
from stage2_trainer.data.output_places import check_file
from stage2_trainer.telemetry.run_log import STEP_LOG

Record = Mapping[str, Any]

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
            from stage2_report.report_picture import EndSamples

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
