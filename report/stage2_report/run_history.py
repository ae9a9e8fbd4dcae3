"""A run's log: its records one by one, and its numbers over the steps.

The log is `<output_dir>/stage2_log.jsonl`, or the saved output of `kubectl logs`. It is read line by line, because the
log of a week does not fit into memory as objects. Lines that are no records, or still being written, are skipped.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage2_api.errors import counted, refused
from stage2_trainer.telemetry.run_log import STEP_LOG

REWARD, SPREAD = "reward", "reward_std"
"""Keys in the steps of GRPO runs only: the mean weighted reward, and its standard deviation."""
KEPT = ("loss", "grad_norm", "learning_rate", "reward", "rewards/", "step/", "rollout/", "completions/", "sync/seconds")
"""Prefixes of the keys that the page draws."""
WAY_OUT = "give <output_dir>, its stage2_log.jsonl, or the saved output of `kubectl logs` of the learner"

NAMED = 3  # samples that were set aside, with their reasons

Record = Mapping[str, Any]
Points = list[tuple[int, float]]


def find_log(run: Path, argument: str = "RUN") -> Path:
    """Return the log of a run's folder, or of its log. Raises ConfigError where there is none."""
    log = run / STEP_LOG if os.path.isdir(run) else run
    if not os.path.isfile(log):
        raise refused(argument, str(run), f"must be a run's output folder with {STEP_LOG}, or a log", WAY_OUT)
    return log


def folder_of_images(*logs: Path) -> Path | None:
    """Return the folder of a saved log, whose paths may be anybody's: images are found there by name; else None."""
    return next((log.parent for log in logs if log.name != STEP_LOG), None)


def read_records(path: Path, start: bytes = b'{"event"') -> Iterator[dict[str, Any]]:
    """Yield the records of a log whose lines start with `start`."""
    with path.open("rb") as lines:
        for line in lines:
            if record := parse_record(line, start):
                yield record


def parse_record(line: bytes, start: bytes = b'{"event"') -> dict[str, Any] | None:
    """Return a line of a log as a record; None for any other line."""
    if not line.startswith(start):
        return None
    try:
        record: dict[str, Any] = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record


def reward_means(step: Record) -> dict[str, str]:
    """Return, by the name of each reward of a GRPO run, the key of its mean in a step's record."""
    prefix, suffix = "rewards/", "/mean"
    means = [key for key in step if key.startswith(prefix) and key.endswith(suffix)]
    return {key[len(prefix) : -len(suffix)]: key for key in means}


class SeriesStore:
    """Numbers by key and step, 16 bytes each; NaN for null. A step that was trained twice counts as the second time."""

    def __init__(self) -> None:
        self._steps: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._values: dict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, step: int, figures: Record) -> None:
        """Keep the numbers among these figures, and nulls: a chart has a gap there."""
        for key, value in figures.items():
            if value is None or isinstance(value, (int, float)):
                self._steps[key].append(step)
                self._values[key].append(math.nan if value is None else value)

    def keys(self) -> list[str]:
        """Return the keys in the order in which they came."""
        return list(self._steps)

    def points(self, key: str) -> Points:
        """Return (step, value) sorted by step; nothing for an unknown key."""
        if key not in self._steps:
            return []
        return sorted(dict(zip(self._steps[key], self._values[key], strict=True)).items())


class SetAside:
    """The samples that a run set aside, with the reasons of the first few."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def add(self, record: Record) -> None:
        """Add a `bad_sample` record; a sample counts once."""
        self._reasons[str(record["sample_id"])] = str(record["reason"])

    def __str__(self) -> str:
        """Return a sentence; empty where there are none."""
        if not self._reasons:
            return ""
        first = "; ".join(f"{name}: {why}" for name, why in [*self._reasons.items()][:NAMED])
        more = "; …" if len(self._reasons) > NAMED else ""
        return f"{counted(len(self._reasons), 'sample')} set aside ({first}{more})"


@dataclass(frozen=True)
class EvaluatedRun:
    """A run to draw: its name, its log, and the steps that were evaluated."""

    name: str
    log: Path
    steps: Sequence[int]


@dataclass
class RunHistory:
    """The log of a run. reproducibility, best: the last records of these events."""

    name: str
    log: Path
    steps: SeriesStore = field(default_factory=SeriesStore)
    evaluations: SeriesStore = field(default_factory=SeriesStore)
    reproducibility: Record = field(default_factory=dict)
    best: Record = field(default_factory=dict)
    set_aside: SetAside = field(default_factory=SetAside)
    last_step: int = 0

    @property
    def evaluated(self) -> list[int]:
        """The steps of all evaluations by rollouts, in order."""
        return [step for step, _ in self.evaluations.points("eval_rollout_f1")]

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations, by rollouts or by GRPO's rewards."""
        return max(len(self.evaluations.points(key)) for key in ("eval_rollout_f1", f"eval_{REWARD}"))

    def add(self, record: Record) -> None:
        """Add one record of the log."""
        event, step = record.get("event"), record.get("step")
        if event == "reproducibility":
            self.reproducibility = record
        elif event == "bad_sample":
            self.set_aside.add(record)
        if not isinstance(step, int):
            return
        if event == "step":
            self.last_step = max(self.last_step, step)
            self.steps.add(step, {key: value for key, value in record.items() if key.startswith(KEPT)})
        elif event == "evaluation":
            self.evaluations.add(step, record)
        elif event == "best_checkpoint":
            self.best = record


def read_history(run: Path) -> RunHistory:
    """Return the history of a run's folder, or of its log. Raises ConfigError where there is no log."""
    log = find_log(run)
    history = RunHistory(log.resolve().parent.name if log.name == STEP_LOG else log.name, log)
    for record in read_records(log):
        history.add(record)
    return history
