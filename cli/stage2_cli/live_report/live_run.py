"""What a screen shows of a run, taken from its log line by line. However long the log is, this stays small."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from stage2_api.log_lines import one_line
from stage2_cli.run_console import parse_record
from stage2_report.reward_keys import REWARD

RECENT = 50
"""Steps over which times are averaged, and losses are kept."""
MOST_WARNINGS, MOST_SERVERS, MOST_CHARACTERS = 5, 16, 200
SCORES = {
    "eval_rollout_f1_class_iou50": "F1 with class, IoU 0.5",
    "eval_rollout_precision_class_iou50": "precision with class",
    "eval_rollout_recall_class_iou50": "recall with class",
    "eval_rollout_f1": "F1 of training's matching",
    "eval_rollout_ap": "AP",
    "eval_rollout_ap50": "AP50",
    "eval_rollout_parse_rate": "whole answers",
    f"eval_{REWARD}": "mean reward",
}
"""Keys of an evaluation that are shown; more is better in all of them."""
FIGURES = {
    "rollout/staleness": "staleness, in steps",
    REWARD: "mean reward",
    "rollout/f1": "F1 of training rollouts",
    "rollout/gen_new_tokens_mean": "tokens of an answer",
    "completions/mean_length": "tokens of an answer",
    "bad_samples_total": "samples set aside",
}
"""Keys of a step that are shown."""
WALL = "step/wall_s"
PARTS = ("generate", "wait", "encode", "match", "pack", "forward", "backward", "optimizer", "sync", "log", "other")
_SPOKEN = re.compile(r"\S+ \S+ (WARNING|ERROR|CRITICAL) [\w.]+: (.*)")
"""A line of the learner's standard error, as `log_lines` forms it; saved logs have them."""


@dataclass(frozen=True)
class Score:
    """A figure of the last evaluation, and the best of all, with its step."""

    last: float
    best: float
    best_step: int


@dataclass(frozen=True)
class LiveServer:
    """A rollout server in the last step. busy: share of the step."""

    name: str
    busy: float
    in_flight: float


@dataclass
class LiveRun:
    """The state of a run. phase: starting, training or ended. max_steps: None where the log does not say it."""

    name: str
    phase: str = "starting"
    made_of: str = ""
    step: int = 0
    max_steps: int | None = None
    heard: str = "nothing yet"
    loss: float | None = None
    evaluated: int | None = None
    best: str = ""
    ended: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)
    servers: list[LiveServer] = field(default_factory=list)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    times: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_WARNINGS))

    def note(self, line: bytes) -> str | None:
        """Take a line of the log; return what it says to people, None where it says nothing new."""
        text = line.decode(errors="replace")
        record = parse_record(text)
        if record is None:
            said = _SPOKEN.match(text)
            return self._warned(f"{said[1].lower()}: {said[2]}") if said else None
        taken = _EVENTS.get(str(record["event"]))
        return taken(self, record) if taken else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, mean over the last ones."""
        return fmean(one[WALL] for one in self.times) if self.times else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the steps to come will take; those of evaluations and saves come on top."""
        if self.max_steps is None or self.step_seconds is None:
            return None
        return max(0, self.max_steps - self.step) * self.step_seconds

    def shares(self) -> dict[str, float]:
        """Return each part's share of the last steps' time, without those that took none."""
        walls = sum(one[WALL] for one in self.times)
        sums = {part: sum(one.get(part, 0.0) for one in self.times) for part in PARTS}
        return {part: total / walls for part, total in sums.items() if total > 0 and walls > 0}

    def _made(self, record: Mapping[str, Any]) -> None:
        data = record.get("dataset")
        of = f", {data.get('records')} records of {data.get('path')}" if isinstance(data, Mapping) else ""
        self.made_of = readable(f"{record.get('model')}{of}")
        self.heard, self.phase, self.ended = "the run's beginning", "starting", ""

    def _started(self, record: Mapping[str, Any]) -> str:
        self.step, self.max_steps = _step(record), _step(record, "max_steps")
        self.heard, self.phase, self.ended = "the start of training", "training", ""
        return f"training goes from step {self.step} to {self.max_steps}"

    def _stepped(self, record: Mapping[str, Any]) -> str:
        self.step, self.phase, self.ended = _step(record), "training", ""
        self.heard = f"step {self.step}"
        self.loss = _number(record.get("loss"))
        if self.loss is not None:
            self.losses.append(self.loss)
        self.figures = {key: found for key in FIGURES if (found := _number(record.get(key))) is not None}
        if (wall := _number(record.get(WALL))) is not None:
            parts = {part: _number(record.get(f"step/{part}_s")) or 0.0 for part in PARTS}
            self.times.append({WALL: wall, **parts})
        servers = record.get("servers")
        if isinstance(servers, list):
            self.servers = [_server(one) for one in servers[:MOST_SERVERS] if isinstance(one, Mapping)]
        return f"step {self.step}" + ("" if self.loss is None else f": loss {self.loss:.3f}")

    def _evaluated(self, record: Mapping[str, Any]) -> str:
        self.evaluated = _step(record)
        self.heard = f"the evaluation at step {self.evaluated}"
        found = {key: value for key in SCORES if (value := _number(record.get(key))) is not None}
        for key, value in found.items():
            before = self.scores.get(key)
            better = before is None or value > before.best
            best = (value, self.evaluated) if before is None or better else (before.best, before.best_step)
            self.scores[key] = Score(value, *best)
        told = ", ".join(f"{SCORES[key]} {value:.3f}" for key, value in list(found.items())[:3])
        return f"evaluation at step {self.evaluated}: {told}"

    def _best(self, record: Mapping[str, Any]) -> str:
        score = _number(record.get("score"))
        shown = "" if score is None else f" {score:.3f}"
        self.best = readable(f"step {_step(record)}, {record.get('metric')}{shown}")
        return f"best so far: {self.best}"

    def _told_warning(self, record: Mapping[str, Any]) -> str:
        return self._warned(f"{str(record.get('level')).lower()}: {record.get('message')}")

    def _warned(self, text: str) -> str:
        self.warnings.append(readable(text))
        return self.warnings[-1]

    def _ended(self, record: Mapping[str, Any]) -> str:
        message = record.get("message")
        why = f": {message}" if message else ""
        self.phase, self.heard = "ended", "the run's end"
        self.ended = readable(f"the run ended at step {_step(record)}: {record.get('outcome')}{why}", 1000)
        return self.ended


_EVENTS: Mapping[str, Callable[[LiveRun, Mapping[str, Any]], str | None]] = {
    "reproducibility": LiveRun._made,
    "start": LiveRun._started,
    "step": LiveRun._stepped,
    "evaluation": LiveRun._evaluated,
    "best_checkpoint": LiveRun._best,
    "warning": LiveRun._told_warning,
    "end": LiveRun._ended,
}


def readable(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text of the log as one line of characters that print, cut where it is long."""
    shown = one_line(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _server(record: Mapping[str, Any]) -> LiveServer:
    busy, in_flight = _number(record.get("busy_share")), _number(record.get("in_flight"))
    return LiveServer(readable(str(record.get("server"))), busy or 0.0, in_flight or 0.0)


def _step(record: Mapping[str, Any], key: str = "step") -> int:
    return int(_number(record.get(key)) or 0)


def _number(value: object) -> float | None:
    """Return a figure of the log; None for what is none, or none that a screen can show."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number else None  # type: ignore[arg-type]
