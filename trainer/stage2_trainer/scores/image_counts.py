"""What an image adds to the figures of a set: right, wrong and missed objects at IoU 0.5, with and without their class.

As many objects are matched one to one as can be, whatever their order or scores (Kuhn-Munkres), so one answer has one
figure. What nobody can judge is left out: in LVIS, objects of classes that were not looked for; what lies in a crowd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from stage2_trainer.scores.scored_image import BoolArray, FloatArray, ScoredImage, normalised

Verdict = Literal["right", "misnamed", "duplicate", "wrong", "unjudged"]


@dataclass(frozen=True)
class Verdicts:
    """The verdict on each answered object of an image, and whether each true one was found, at IoU 0.5.

    right: it has a true object of its class to itself. misnamed: only one of another class. duplicate: neither, and it
    repeats an earlier one. unjudged: nobody can say. found: a true object has an answered one of its class to itself;
    a crowd counts as found.
    """

    answered: tuple[Verdict, ...]
    found: tuple[bool, ...]


def verdicts(image: ScoredImage) -> Verdicts:
    """Return the verdicts on the objects of one image; as many are right as the class-aware F1 counts."""
    true = np.flatnonzero(~image.crowds)
    alike = np.where(same_class(image), image.iou, 0.0)
    named = dict(matches(alike[:, true]))
    taken = set(named.values())
    left = np.array([place for place in range(len(true)) if place not in taken], dtype=int)
    rest = np.array([place for place in range(len(image.said)) if place not in named], dtype=int)
    placed = {int(rest[a]) for a, _ in matches(image.iou[np.ix_(rest, true[left])])}
    in_crowd = (alike[:, image.crowds] >= CLOSE).any(1)
    free = image.unchecked | image.in_loose_class | in_crowd

    def verdict(place: int) -> Verdict:
        if place in named:
            return "right"
        if free[place]:
            return "unjudged"
        if place in placed:
            return "misnamed"
        return "duplicate" if image.duplicates[place] else "wrong"

    found = np.ones(len(image.truth), dtype=bool)
    found[true[left]] = False
    return Verdicts(tuple(map(verdict, range(len(image.said)))), tuple(map(bool, found)))


CLOSE = 0.5
PREFERRED = 2.0  # one more match outweighs any overlap


@dataclass(frozen=True)
class ImageCounts:
    """Counts of one image; `class_` are those of matches within a class.

    answered: all objects of the answer; judged: without those that nobody can judge. named_alike, named_exactly:
    matched objects whose description is the true one's, normalised or as it is. absolute_error: of the number of
    objects.
    """

    images: float
    truth: float
    answered: float
    judged: float
    right: float
    class_judged: float
    class_right: float
    named_alike: float
    named_exactly: float
    duplicates: float
    parsed: float
    truncated: float
    looped: float
    absolute_error: float


COLUMNS = {one.name: place for place, one in enumerate(fields(ImageCounts))}

COUNTS = frozenset({"misses", "duplicates"})
"""Figures that are whole numbers."""


def image_counts(image: ScoredImage) -> ImageCounts:
    """Return the counts of one image."""
    true = ~image.crowds
    same = same_class(image)
    pairs, class_pairs = matches(image.iou[:, true]), matches(np.where(same, image.iou, 0.0)[:, true])
    named = [(image.answer.objects[a].desc, image.truth[t].desc) for a, t in pairs]
    truth = int(true.sum())
    return ImageCounts(
        images=1,
        truth=truth,
        answered=len(image.said),
        judged=len(image.said) - _unjudged(image, pairs, image.iou),
        right=len(pairs),
        class_judged=len(image.said) - _unjudged(image, class_pairs, np.where(same, image.iou, 0.0)),
        class_right=len(class_pairs),
        named_alike=sum(normalised(one) == normalised(other) for one, other in named),
        named_exactly=sum(one == other for one, other in named),
        duplicates=int(image.duplicates.sum()),
        parsed=image.answer.parsed,
        truncated=image.answer.truncated,
        looped=image.answer.looped,
        absolute_error=abs(len(image.said) - truth),
    )


def table_of(counts: list[ImageCounts]) -> FloatArray:
    """Return counts as (images, columns), the columns in the order of `COLUMNS`."""
    return np.array([[getattr(one, name) for name in COLUMNS] for one in counts], dtype=np.float64)


def figures(sums: FloatArray) -> dict[str, FloatArray]:
    """Return the figures of sums of counts, (..., columns): each of shape (...)."""
    of: Mapping[str, FloatArray] = {name: sums[..., place] for name, place in COLUMNS.items()}
    return {
        "f1@0.5": _ratio(2 * of["right"], of["judged"] + of["truth"]),
        "precision@0.5": _ratio(of["right"], of["judged"]),
        "recall@0.5": _ratio(of["right"], of["truth"]),
        "f1_class@0.5": _ratio(2 * of["class_right"], of["class_judged"] + of["truth"]),
        "precision_class@0.5": _ratio(of["class_right"], of["class_judged"]),
        "recall_class@0.5": _ratio(of["class_right"], of["truth"]),
        "misses": of["truth"] - of["right"],
        "duplicates": of["duplicates"],
        "duplicate_rate": _ratio(of["duplicates"], of["answered"]),
        "objects_per_truth": _ratio(of["answered"], of["truth"]),
        "counting_error": _ratio(of["absolute_error"], of["images"]),
        "desc_exact": _ratio(of["named_exactly"], of["right"]),
        "desc_normalised": _ratio(of["named_alike"], of["right"]),
        "parse_rate": _ratio(of["parsed"], of["images"]),
        "truncated_rate": _ratio(of["truncated"], of["images"]),
        "loop_rate": _ratio(of["looped"], of["images"]),
    }


def worst_of(counts: FloatArray) -> int:
    """Return the image of the lowest class-aware F1; of equals the one with most wrong and missed objects."""
    wrong = counts[:, COLUMNS["class_judged"]] + counts[:, COLUMNS["truth"]] - 2 * counts[:, COLUMNS["class_right"]]
    clean = wrong == 0
    score = np.where(clean, 1.0, figures(counts)["f1_class@0.5"])
    return int(np.lexsort((-wrong, score))[0])


def same_class(image: ScoredImage) -> BoolArray:
    """Return which answered (rows) and true objects are of one class."""
    said, names = np.array(image.said, dtype=object), np.array(image.names, dtype=object)
    return np.asarray(said[:, None] == names[None, :], dtype=bool).reshape(len(said), len(names))


def matches(iou: FloatArray) -> list[tuple[int, int]]:
    """Return the matches, as many as can be, of answered and true objects that overlap enough."""
    near = iou >= CLOSE
    if not near.any():
        return []
    rows, columns = linear_sum_assignment(np.where(near, PREFERRED * min(iou.shape) + iou, 0.0), maximize=True)
    return [(int(row), int(column)) for row, column in zip(rows, columns, strict=True) if near[row, column]]


def _unjudged(image: ScoredImage, pairs: list[tuple[int, int]], iou: FloatArray) -> int:
    """Return how many unmatched objects nobody can judge."""
    free = np.ones(len(image.said), dtype=bool)
    free[[answered for answered, _ in pairs]] = False
    in_crowd = (iou[:, image.crowds] >= CLOSE).any(1)
    return int((free & (image.unchecked | image.in_loose_class | in_crowd)).sum())


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Return part / whole, and 0 where there is nothing to have a part of."""
    return np.divide(part, whole, out=np.zeros_like(whole, dtype=np.float64), where=whole != 0)
