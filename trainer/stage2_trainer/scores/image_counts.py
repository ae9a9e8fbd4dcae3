"""The counts of one image: right, wrong and missed objects at IoU 0.5, with and without their class.

As many objects as possible are matched one to one, whatever their order or scores (Kuhn-Munkres), so an answer has one
figure. Objects that nobody can judge are left out: in LVIS those of classes that annotators did not look for, and
objects in a crowd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from scipy.optimize import linear_sum_assignment

from stage2_trainer.matching.tokens import BoolArray, FloatArray
from stage2_trainer.scores.scored_image import ScoredImage, normalised

CLOSE = 0.5
PREFERRED = 2.0  # one more match outweighs any overlap

Verdict = Literal["right", "misnamed", "duplicate", "wrong", "unjudged"]


@dataclass(frozen=True)
class ImageCounts:
    """Counts of one image; `class_` are those of matches within a class.

    answered: all objects of the answer. judged: without those that nobody can judge. named_alike, named_exactly:
    matched objects with the true description, normalised or as it is. absolute_error: of the number of objects.
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

COUNTS = frozenset({"misses", "duplicates"})  # figures that are whole numbers


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
        answered=len(image.names),
        judged=int(judged(image, pairs, image.iou).sum()),
        right=len(pairs),
        class_judged=int(judged(image, class_pairs, np.where(same, image.iou, 0.0)).sum()),
        class_right=len(class_pairs),
        named_alike=sum(normalised(one) == normalised(other) for one, other in named),
        named_exactly=sum(one == other for one, other in named),
        duplicates=int(image.duplicates.sum()),
        parsed=image.answer.parsed,
        truncated=image.answer.truncated,
        looped=image.answer.looped,
        absolute_error=abs(len(image.names) - truth),
    )


def table_of(counts: list[ImageCounts]) -> FloatArray:
    """Return counts as (images, columns), the columns in the order of `COLUMNS`."""
    return np.array([[getattr(one, name) for name in COLUMNS] for one in counts], dtype=np.float64)


def figures(sums: FloatArray) -> dict[str, FloatArray]:
    """Return the figures of sums of counts, (..., columns): each of shape (...)."""
    total: Mapping[str, FloatArray] = {name: sums[..., place] for name, place in COLUMNS.items()}
    return {
        "f1@0.5": _ratio(2 * total["right"], total["judged"] + total["truth"]),
        "precision@0.5": _ratio(total["right"], total["judged"]),
        "recall@0.5": _ratio(total["right"], total["truth"]),
        "f1_class@0.5": _ratio(2 * total["class_right"], total["class_judged"] + total["truth"]),
        "precision_class@0.5": _ratio(total["class_right"], total["class_judged"]),
        "recall_class@0.5": _ratio(total["class_right"], total["truth"]),
        "misses": total["truth"] - total["right"],
        "duplicates": total["duplicates"],
        "duplicate_rate": _ratio(total["duplicates"], total["answered"]),
        "objects_per_truth": _ratio(total["answered"], total["truth"]),
        "counting_error": _ratio(total["absolute_error"], total["images"]),
        "desc_exact": _ratio(total["named_exactly"], total["right"]),
        "desc_normalised": _ratio(total["named_alike"], total["right"]),
        "parse_rate": _ratio(total["parsed"], total["images"]),
        "truncated_rate": _ratio(total["truncated"], total["images"]),
        "loop_rate": _ratio(total["looped"], total["images"]),
    }


def worst_image(counts: FloatArray) -> int:
    """Return the index of the image with the lowest class-aware F1; of equals, that with most errors."""
    wrong = counts[:, COLUMNS["class_judged"]] + counts[:, COLUMNS["truth"]] - 2 * counts[:, COLUMNS["class_right"]]
    clean = wrong == 0
    score = np.where(clean, 1.0, figures(counts)["f1_class@0.5"])
    return int(np.lexsort((-wrong, score))[0])


def same_class(image: ScoredImage) -> BoolArray:
    """Return which answered (rows) and true objects are of the same class."""
    answered, true = np.array(image.names, dtype=object), np.array(image.true_names, dtype=object)
    return np.asarray(answered[:, None] == true[None, :], dtype=bool).reshape(len(answered), len(true))


def matches(iou: FloatArray, close: float = CLOSE) -> list[tuple[int, int]]:
    """Return the largest set of matches of answered and true objects that overlap enough."""
    near = iou >= close
    if not near.any():
        return []
    rows, columns = linear_sum_assignment(np.where(near, PREFERRED * min(iou.shape) + iou, 0.0), maximize=True)
    return [(int(row), int(column)) for row, column in zip(rows, columns, strict=True) if near[row, column]]


@dataclass(frozen=True)
class Verdicts:
    """The verdict on each answered object of an image, and whether each true one was found, at IoU 0.5.

    right: matched to a true object of its class. misnamed: matched only to one of another class. duplicate: neither,
    and it repeats an earlier one. unjudged: it cannot be judged. found: a true object is matched to an answered one of
    its class; a crowd counts as found.
    """

    answered: tuple[Verdict, ...]
    found: tuple[bool, ...]


def verdicts(image: ScoredImage) -> Verdicts:
    """Return the verdicts on the objects of one image; those that are right are the matches of the class-aware F1."""
    true = np.flatnonzero(~image.crowds)
    alike = np.where(same_class(image), image.iou, 0.0)
    named = dict(matches(alike[:, true]))
    matched = set(named.values())
    left = np.array([place for place in range(len(true)) if place not in matched], dtype=int)
    rest = np.array([place for place in range(len(image.names)) if place not in named], dtype=int)
    placed = {int(rest[a]) for a, _ in matches(image.iou[np.ix_(rest, true[left])])}
    unjudged = _cannot_be_judged(image, alike)

    def verdict(place: int) -> Verdict:
        if place in named:
            return "right"
        if unjudged[place]:
            return "unjudged"
        if place in placed:
            return "misnamed"
        return "duplicate" if image.duplicates[place] else "wrong"

    found = np.ones(len(image.truth), dtype=bool)
    found[true[left]] = False
    return Verdicts(tuple(map(verdict, range(len(image.names)))), tuple(map(bool, found)))


def judged(image: ScoredImage, pairs: list[tuple[int, int]], iou: FloatArray) -> BoolArray:
    """Return which answered objects count: those that are matched, and those that can be judged."""
    found = ~_cannot_be_judged(image, iou)
    found[[answered for answered, _ in pairs]] = True
    return found


def _cannot_be_judged(image: ScoredImage, iou: FloatArray) -> BoolArray:
    in_crowd = (iou[:, image.crowds] >= CLOSE).any(1)
    return np.asarray(image.unchecked | image.in_loose_classes | in_crowd)


def _ratio(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Return part / whole, and 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros_like(whole, dtype=np.float64), where=whole != 0)
