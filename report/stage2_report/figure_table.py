"""The table of held-out figures with their intervals: of one run before and after, or of two runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stage2_report.held_out_rollouts import EvaluatedStep
from stage2_trainer.scores.answer_scores import differences, intervals, resampled
from stage2_trainer.scores.image_counts import COUNTS

FIGURES = {
    "f1_class@0.5": "F1 with class, IoU 0.5",
    "precision_class@0.5": "precision with class",
    "recall_class@0.5": "recall with class",
    "f1@0.5": "F1 whatever the class",
    "desc_exact": "named truly, of those in place",
    "AP": "AP",
    "AP50": "AP50",
    "AP75": "AP75",
    "AR": "AR",
    "misses": "missed objects",
    "duplicates": "duplicates",
    "objects_per_truth": "objects for each true one",
    "counting_error": "counting error",
    "parse_rate": "whole answers",
    "truncated_rate": "cut off",
    "loop_rate": "repeating",
}
LESS_IS_BETTER = frozenset({"misses", "duplicates", "counting_error", "truncated_rate", "loop_rate"})
NEITHER = frozenset({"objects_per_truth"})
DRAWS, SEED = 500, 0  # as `stage2 evaluate` draws where nobody says otherwise


@dataclass(frozen=True)
class FigureRow:
    """One figure. cells: value and interval of each evaluation. change: with its interval, and better, worse or ''."""

    name: str
    cells: Sequence[tuple[str, str]]
    change: tuple[str, str, str] | None


@dataclass(frozen=True)
class FigureTable:
    """Held-out figures of one evaluation, or of two that are compared on the same images."""

    columns: Sequence[str]
    rows: Sequence[FigureRow]
    images: int
    compared: bool


def figure_table(evaluations: Sequence[tuple[str, EvaluatedStep]]) -> FigureTable:
    """Return the table of one or two evaluations; they are compared where both answer the same samples."""
    compared = len(evaluations) == 2 and set(evaluations[0][1].images) == set(evaluations[1][1].images)
    found = [_with_intervals(one) for _, one in evaluations]
    changes: Mapping[str, Mapping[str, Any]] = {}
    if compared:
        before, after = (one.scores for _, one in evaluations)
        changes = differences(before, after, _draws(evaluations[0][1]))
    rows = [
        FigureRow(
            title,
            [(_shown(values[name], name), _interval(spread.get(name), name)) for values, spread in found],
            _change(changes.get(name), name) if compared else None,
        )
        for name, title in FIGURES.items()
    ]
    return FigureTable([label for label, _ in evaluations], rows, len(evaluations[-1][1].images), compared)


def _draws(one: EvaluatedStep) -> Any:
    return resampled(len(one.images), draws=DRAWS, seed=SEED)


def _with_intervals(one: EvaluatedStep) -> tuple[Mapping[str, float], Mapping[str, Sequence[float]]]:
    values = one.scores.figures(np.ones(len(one.images)))
    return values, intervals(one.scores.drawn(_draws(one)), values)


def _change(found: Mapping[str, Any] | None, name: str) -> tuple[str, str, str]:
    if found is None:
        return "–", "", ""
    low, high = found["interval"]
    rises = (low > 0) - (high < 0)
    better = 0 if name in NEITHER else rises * (-1 if name in LESS_IS_BETTER else 1)
    sense = {1: "better", -1: "worse", 0: ""}[better]
    return _shown(found["difference"], name, sign="+"), _interval((low, high), name, sign="+"), sense


def _interval(ends: Sequence[float] | None, name: str, *, sign: str = "") -> str:
    return "" if ends is None else f"{_shown(ends[0], name, sign=sign)} to {_shown(ends[1], name, sign=sign)}"


def _shown(value: float, name: str, *, sign: str = "") -> str:
    if math.isnan(value):
        return "–"
    digits = 0 if name in COUNTS else 3
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"  # + 0.0: no minus before a zero
