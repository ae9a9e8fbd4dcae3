"""The field's scores of an evaluation's answers, equal to those of `stage2 evaluate` on the same rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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


def answer_metrics(records: Sequence[Record], answers: Mapping[int, ReadAnswer]) -> dict[str, float]:
    """Return the `rollout_*` scores of answers, without the evaluation's prefix; 0 for what there is not.

    answers: by the index of the record that they answer; a record without one is left out. The order is that of
    indices: it counts where scores are equal.
    """
    answered = sorted((one for one in records if one.index in answers), key=lambda one: one.index)
    if not answered:
        return {f"rollout_{name}": 0.0 for name in METRICS.values()}
    images = scored_images(answered, [answers[one.index] for one in answered])
    figures = AnswerScores.of(images).figures(np.ones(len(images)))
    return {
        f"rollout_{name}": 0.0 if math.isnan(figures[source]) else figures[source] for source, name in METRICS.items()
    }
