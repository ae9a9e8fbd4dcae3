"""The table of held-out figures with their intervals: of one run before and after, or of two runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stage2_report.run_history import events
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.answer_scores import AnswerScores, differences, intervals, resampled
from stage2_trainer.scores.answer_text import read_answer
from stage2_trainer.scores.image_counts import COUNTS
from stage2_trainer.scores.scored_image import ScoredImage, scored_images
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG

HELD_OUT, SAMPLE = b'{"event": "rollout", "part": "held-out"', b'{"event": "evaluation_sample"'
UNKNOWN_SIDE = 1000  # of an image, in records of runs that did not write it down


@dataclass(frozen=True)
class HeldOutRollout:
    """One held-out record with its answer."""

    record: Record
    text: str
    finish_reason: str | None

    @classmethod
    def of(cls, line: Mapping[str, Any], place: int) -> HeldOutRollout:
        """Return what a line of the run's records says. place: of the line, where it does not say the record's."""
        record = Record(
            index=line.get("record_index", place),
            sample_id=str(line["sample_id"]),
            images=(line["image"],) if line.get("image") else (),
            width=line.get("width") or UNKNOWN_SIDE,
            height=line.get("height") or UNKNOWN_SIDE,
            objects=tuple(GTObject(one["desc"], one["kind"], tuple(one["bins"])) for one in line["ground_truth"]),
            metadata=line.get("metadata", {}),
        )
        return cls(record, line["text"], line.get("finish_reason"))


@dataclass(frozen=True)
class EvaluatedStep:
    """The rollouts of one evaluation, by sample, in the order of the records."""

    step: int
    rollouts: Mapping[str, HeldOutRollout]

    @cached_property
    def images(self) -> dict[str, ScoredImage]:
        """The same as scores know them."""
        every = list(self.rollouts.values())
        answers = [read_answer(one.text, finish_reason=one.finish_reason) for one in every]
        return dict(zip(self.rollouts, scored_images([one.record for one in every], answers), strict=True))

    @cached_property
    def scores(self) -> AnswerScores:
        """Their scores."""
        return AnswerScores.of(list(self.images.values()))

    def within(self, whole: EvaluatedStep) -> EvaluatedStep:
        """Return these rollouts, judged by what is known of all records of another evaluation."""
        example = next(iter(whole.images.values()))
        found = EvaluatedStep(self.step, self.rollouts)
        found.__dict__["images"] = {
            name: replace(one, known=example.known, masks=example.masks) for name, one in self.images.items()
        }
        return found


def read_evaluations(
    log: Path, steps: Collection[int], samples: Collection[str] | None = None
) -> dict[int, EvaluatedStep]:
    """Return the evaluations of these steps that the run wrote down, perhaps of some samples alone.

    From its rollouts; where only the log is there, from the samples that this shows. Of one made again, the last.
    """
    found: dict[int, dict[str, HeldOutRollout]] = {}
    for place, line in enumerate(_lines(log)):
        if line["step"] in steps and (samples is None or str(line["sample_id"]) in samples):
            rollout = HeldOutRollout.of(line, place)
            found.setdefault(line["step"], {})[rollout.record.sample_id] = rollout
    return {step: EvaluatedStep(step, _ordered(found[step])) for step in sorted(found)}


def _ordered(rollouts: Mapping[str, HeldOutRollout]) -> dict[str, HeldOutRollout]:
    return dict(sorted(rollouts.items(), key=lambda pair: pair[1].record.index))


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    files = sorted(path for path in log.parent.glob(f"*{ROLLOUT_LOG}") if _has_held_out(path))
    for path in files:
        yield from events(path, HELD_OUT)
    if not files:
        yield from events(log, SAMPLE)


def _has_held_out(path: Path) -> bool:
    return next(events(path, HELD_OUT), None) is not None


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
