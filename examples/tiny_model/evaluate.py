"""How good the model is on images it never saw: greedy answers, read, and paired with what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from stage2_trainer.matching.ground_truth import GTObject
from stage2_trainer.matching.tokens import CoordVocab
from tiny_model.answers import Answer, read, truth
from tiny_model.batches import encode_prompts
from tiny_model.foreign import Model, Processor
from tiny_model.scenes import Scene

_BATCH = 50
_MAX_NEW_TOKENS = 160
_LOOSE, _STRICT = 0.3, 0.5


@dataclass(frozen=True)
class Quality:
    """Figures over a set of images; rates are fractions of 1.

    Objects are paired one to one for the largest total IoU of their boxes (a polygon's is the box around it). Of an
    answer that is not well-formed, those objects count that can be read.
    """

    images: int
    parse_rate: float
    """Answers that are well-formed: JSON of the right form, to the end."""
    recall_at_30: float
    """True objects with a partner at IoU >= 0.3."""
    precision_at_30: float
    recall_at_50: float
    precision_at_50: float
    mean_iou: float
    """Over the pairs with IoU >= 0.3."""
    desc_exact: float
    """Over the same pairs: the description is the true one."""
    objects_predicted: float
    """An image."""
    objects_true: float
    """An image."""


def quality(model: Model, processor: Processor, scenes: Sequence[Scene]) -> tuple[Quality, list[Answer]]:
    """Return the model's figures on the scenes, and its answers."""
    answers = greedy_answers(model, processor, scenes)
    return measure(answers, [truth(scene) for scene in scenes]), answers


@torch.inference_mode()
def greedy_answers(model: Model, processor: Processor, scenes: Sequence[Scene]) -> list[Answer]:
    """Return the model's greedy answer to each scene."""
    vocab = CoordVocab.from_tokenizer(processor.tokenizer)
    answers: list[Answer] = []
    for first in range(0, len(scenes), _BATCH):
        prompts = encode_prompts(processor, scenes[first : first + _BATCH])
        ids = model.generate(**prompts, max_new_tokens=_MAX_NEW_TOKENS)[:, prompts["input_ids"].shape[1] :]
        answers += [read(row, vocab) for row in ids.tolist()]
    return answers


def measure(answers: Sequence[Answer], truths: Sequence[Sequence[GTObject]]) -> Quality:
    """Return the figures of `answers` against what is in the images."""
    pairs = [pair for answer, true in zip(answers, truths, strict=True) for pair in _pairs(answer.objects, true)]
    ious = np.array([iou for _, _, iou in pairs])
    loose = ious >= _LOOSE
    same = np.array([p.desc == t.desc for p, t, _ in pairs], dtype=bool)
    predicted, true = sum(len(answer.objects) for answer in answers), sum(len(objects) for objects in truths)
    hits_30, hits_50 = int(loose.sum()), int((ious >= _STRICT).sum())
    return Quality(
        images=len(answers),
        parse_rate=_ratio(sum(answer.well_formed for answer in answers), len(answers)),
        recall_at_30=_ratio(hits_30, true),
        precision_at_30=_ratio(hits_30, predicted),
        recall_at_50=_ratio(hits_50, true),
        precision_at_50=_ratio(hits_50, predicted),
        mean_iou=_ratio(float(ious[loose].sum()), hits_30),
        desc_exact=_ratio(int(same[loose].sum()), hits_30),
        objects_predicted=_ratio(predicted, len(answers)),
        objects_true=_ratio(true, len(answers)),
    )


def box_ious(found: Sequence[GTObject], true: Sequence[GTObject]) -> NDArray[np.float64]:
    """Return the IoU of each found object's box with each true one's, (found, true)."""
    a = np.array([_box(o) for o in found], dtype=np.float64)[:, None]
    b = np.array([_box(o) for o in true], dtype=np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = sides.clip(min=0).prod(axis=-1)
    union = (a[..., 2:] - a[..., :2]).prod(axis=-1) + (b[..., 2:] - b[..., :2]).prod(axis=-1) - shared
    ious: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return ious


def _box(shape: GTObject) -> tuple[int, int, int, int]:
    xs, ys = shape.bins[0::2], shape.bins[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _pairs(found: Sequence[GTObject], true: Sequence[GTObject]) -> list[tuple[GTObject, GTObject, float]]:
    if not found or not true:
        return []
    ious = box_ious(found, true)
    rows, columns = linear_sum_assignment(ious, maximize=True)
    return [(found[i], true[j], float(ious[i, j])) for i, j in zip(rows.tolist(), columns.tolist(), strict=True)]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
