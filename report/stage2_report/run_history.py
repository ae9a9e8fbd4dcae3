"""A run's log as numbers over its steps, read line by line: the log of a week is larger than memory as objects."""

from __future__ import annotations

import json
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.telemetry.run_log import STEP_LOG

REWARD = "reward"  # of GRPO runs only
SPREAD = "reward_std"


def reward_means(step: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of the means in a step's record, by the names of a GRPO run's rewards."""
    prefix, suffix = "rewards/", "/mean"
    means = [key for key in step if key.startswith(prefix) and key.endswith(suffix)]
    return {key[len(prefix) : -len(suffix)]: key for key in means}


Points = list[tuple[int, float]]
KEPT = ("loss", "grad_norm", "learning_rate", "reward", "rewards/", "step/", "rollout/", "completions/", "sync/seconds")
"""How the keys begin that the page has curves of."""


class SeriesStore:
    """Numbers by key and step, 16 bytes each. Of a step that was trained again, the last counts."""

    def __init__(self) -> None:
        self._steps: dict[str, array[int]] = defaultdict(lambda: array("q"))
        self._values: dict[str, array[float]] = defaultdict(lambda: array("d"))

    def note(self, step: int, figures: Mapping[str, Any]) -> None:
        """Keep the numbers among these."""
        for key, value in figures.items():
            if isinstance(value, (int, float)):
                self._steps[key].append(step)
                self._values[key].append(value)

    def keys(self) -> list[str]:
        """Return the keys, in the order in which they came."""
        return list(self._steps)

    def points(self, key: str) -> Points:
        """Return (step, value) in the order of steps; nothing for a key that is not there."""
        if key not in self._steps:
            return []
        return sorted(dict(zip(self._steps[key], self._values[key], strict=True)).items())


@dataclass
class RunHistory:
    """The log of a run. made_of: its reproducibility record. best: step, metric and score of its best evaluation."""

    name: str
    log: Path
    steps: SeriesStore = field(default_factory=SeriesStore)
    evaluations: SeriesStore = field(default_factory=SeriesStore)
    made_of: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    last_step: int = 0

    @property
    def evaluated(self) -> list[int]:
        """The steps of all evaluations by rollouts, in order."""
        return [step for step, _ in self.evaluations.points("eval_rollout_f1")]

    @property
    def evaluations_made(self) -> int:
        """How many evaluations there are, by rollouts or by GRPO's rewards."""
        return max(len(self.evaluations.points(key)) for key in ("eval_rollout_f1", f"eval_{REWARD}"))

    def note(self, record: Mapping[str, Any]) -> None:
        """Take one record of the log."""
        event, step = record.get("event"), record.get("step")
        if event == "reproducibility":
            self.made_of = record
        if not isinstance(step, int):
            return
        if event == "step":
            self.last_step = max(self.last_step, step)
            self.steps.note(step, {key: value for key, value in record.items() if key.startswith(KEPT)})
        elif event == "evaluation":
            self.evaluations.note(step, record)
        elif event == "best_checkpoint":
            self.best = record


def read_history(run: Path) -> RunHistory:
    """Return the history of a run's folder, or of its log. Raises ConfigError where there is no log."""
    log = run / STEP_LOG if os.path.isdir(run) else run
    if not os.path.isfile(log):
        rule, way_out = f"must be a run's output folder, with its {STEP_LOG}", "give training.output_dir of the run"
        raise ConfigError([Problem("RUN", str(run), rule, way_out)])
    history = RunHistory(_name(log), log)
    for record in events(log):
        history.note(record)
    return history


def events(path: Path, start: bytes = b'{"event"') -> Iterator[dict[str, Any]]:
    """Yield the records of a log whose lines begin so; other output, and a line still in writing, are passed over."""
    with path.open("rb") as lines:
        for line in lines:
            if line.startswith(start):
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                yield found


def _name(log: Path) -> str:
    return log.resolve().parent.name if log.name == STEP_LOG else log.name
