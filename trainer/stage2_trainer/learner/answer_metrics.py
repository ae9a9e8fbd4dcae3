"""The field's scores of an evaluation's answers, equal to those of `stage2 evaluate` on the same rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stage2_trainer.data.records import Record
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.answer_text import ReadAnswer
from stage2_trainer.scores.scored_image import scored_images

METRICS = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "AR": "ar",
    "f1_class@0.5": "f1_class_iou50",
    "precision_class@0.5": "precision_class_iou50",
    "recall_class@0.5": "recall_class_iou50",
    "desc_exact": "desc_exact",
    "duplicates": "duplicates",
    "objects_per_truth": "objects_per_truth",
    "counting_error": "counting_error",
    "parse_rate": "parse_rate",
    "loop_rate": "loop_rate",
}
"""The figures of an evaluation, by the name that `stage2 evaluate` has for them; trackers take no `@`."""


def answer_metrics(answered: Sequence[tuple[Record, ReadAnswer]]) -> dict[str, float]:
    """Return the `rollout_*` scores of answers, without the evaluation's prefix; 0 for what there is not.

    answered: in any order; that of the records counts where scores are equal.
    """
    if not answered:
        return {f"rollout_{name}": 0.0 for name in METRICS.values()}
    records, answers = zip(*sorted(answered, key=lambda pair: pair[0].index), strict=True)
    figures = AnswerScores.of(scored_images(records, answers)).figures(np.ones(len(records)))
    return {
        f"rollout_{name}": 0.0 if math.isnan(figures[source]) else figures[source] for source, name in METRICS.items()
    }
