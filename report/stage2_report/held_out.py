"""The held-out rollouts that a run wrote down, scored as its evaluation scored them, and the table of their figures.

The table compares the first and last evaluation of one run, or the last evaluations of two runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from stage2_report.run_history import read_records
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.answer_scores import AnswerScores, bootstrap_weights, differences
from stage2_trainer.scores.image_counts import COUNTS, OF_OUTLINES
from stage2_trainer.scores.scored_image import ScoredImage, read_answer, scored_images
from stage2_trainer.telemetry.run_log import ROLLOUT_LOG

HELD_OUT, SAMPLE = b'{"event": "rollout", "part": "held-out"', b'{"event": "evaluation_sample"'
UNKNOWN_SIDE = 1000  # of an image whose size the run did not write down


@dataclass(frozen=True)
class HeldOutRollout:
    """One held-out record with its answer."""

    record: Record
    text: str
    finish_reason: str | None

    @classmethod
    def from_line(cls, line: Mapping[str, Any], number: int) -> HeldOutRollout:
        """Return the rollout of a line. number: the line's, for logs that do not write the record's index."""
        record = Record(
            index=line.get("record_index", number),
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
        """The rollouts as the scores take them."""
        every = list(self.rollouts.values())
        answers = [read_answer(one.text, finish_reason=one.finish_reason) for one in every]
        return dict(zip(self.rollouts, scored_images([one.record for one in every], answers), strict=True))

    @cached_property
    def scores(self) -> AnswerScores:
        """The scores of all rollouts."""
        return AnswerScores.from_images(list(self.images.values()))

    def judged_as(self, whole: EvaluatedStep) -> EvaluatedStep:
        """Return these rollouts judged with the classes and overlaps of another, whole evaluation."""
        example = next(iter(whole.images.values()))
        judged = EvaluatedStep(self.step, self.rollouts)
        judged.__dict__["images"] = {
            name: replace(one, known=example.known, masks=example.masks) for name, one in self.images.items()
        }
        return judged


def read_evaluations(
    log: Path, steps: Collection[int], samples: Collection[str] | None = None
) -> dict[int, EvaluatedStep]:
    """Return the evaluations of these steps, of all samples or of these; the last one of a repeated evaluation.

    They come from the run's rollouts; where there is only a log, from the samples in it.
    """
    evaluations: dict[int, dict[str, HeldOutRollout]] = {}
    for number, line in enumerate(_lines(log)):
        if line["step"] in steps and (samples is None or str(line["sample_id"]) in samples):
            rollout = HeldOutRollout.from_line(line, number)
            evaluations.setdefault(line["step"], {})[rollout.record.sample_id] = rollout
    return {
        step: EvaluatedStep(step, dict(sorted(evaluations[step].items(), key=lambda pair: pair[1].record.index)))
        for step in sorted(evaluations)
    }


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    empty = True
    for path in sorted(log.parent.glob(f"*{ROLLOUT_LOG}")):
        for line in read_records(path, HELD_OUT):
            empty = False
            yield line
    if empty:
        yield from read_records(log, SAMPLE)


FIGURES = {
    "f1_class@0.5": "F1 with class, IoU 0.5",
    "precision_class@0.5": "precision with class",
    "recall_class@0.5": "recall with class",
    "f1@0.5": "F1 whatever the class",
    "box_f1@0.5": "F1 of boxes alone, whatever the class",
    "box_f1_class@0.5": "F1 of boxes alone, with class",
    "outline_share": "outlines, of the answered objects",
    "true_outline_share": "outlines, of the true objects",
    "desc_exact": "correctly named, of those in place",
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
NEITHER = frozenset({"objects_per_truth", "outline_share", "true_outline_share"})
DRAWS, SEED = 500, 0  # the defaults of `stage2 evaluate`


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
    """Return the table of one or two evaluations; it compares them where both answer the same samples."""
    compared = len(evaluations) == 2 and set(evaluations[0][1].images) == set(evaluations[1][1].images)
    columns = []
    for _, one in evaluations:
        draws = bootstrap_weights(len(one.images), draws=DRAWS, seed=SEED)
        values = one.scores.figures(np.ones(len(one.images)))
        columns.append((values, one.scores.intervals(draws)))
    changes = differences(evaluations[0][1].scores, evaluations[1][1].scores, draws) if compared else {}
    outlines = any(image.masks for _, one in evaluations for image in one.scores.images)
    rows = [
        FigureRow(
            title,
            [(_text(values[name], name), _interval(spread.get(name), name)) for values, spread in columns],
            _change(changes.get(name), name) if compared else None,
        )
        for name, title in FIGURES.items()
        if outlines or name not in OF_OUTLINES
    ]
    return FigureTable([label for label, _ in evaluations], rows, len(evaluations[-1][1].images), compared)


def _change(difference: Mapping[str, Any] | None, name: str) -> tuple[str, str, str]:
    if difference is None:
        return "–", "", ""
    low, high = difference["interval"]
    rises = (low > 0) - (high < 0)
    better = 0 if name in NEITHER else rises * (-1 if name in LESS_IS_BETTER else 1)
    sense = {1: "better", -1: "worse", 0: ""}[better]
    return _text(difference["difference"], name, sign="+"), _interval((low, high), name, sign="+"), sense


def _interval(ends: Sequence[float] | None, name: str, *, sign: str = "") -> str:
    return "" if ends is None else f"{_text(ends[0], name, sign=sign)} to {_text(ends[1], name, sign=sign)}"


def _text(value: float, name: str, *, sign: str = "") -> str:
    if math.isnan(value):
        return "–"
    digits = 0 if name in COUNTS else 3
    return f"{round(value, digits) + 0.0:{sign},.{digits}f}"  # + 0.0: no minus before a zero
