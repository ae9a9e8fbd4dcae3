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

    answered: all objects of the answer. judged: without those that nobody can judge. `box_`: the same with all objects
    compared as boxes. outlines, true_outlines: objects that are no boxes. named_alike, named_exactly: matched objects
    with the true description, normalised or as it is. absolute_error: of the number of objects.
    """

    images: float
    truth: float
    answered: float
    judged: float
    right: float
    class_judged: float
    class_right: float
    box_judged: float
    box_right: float
    box_class_judged: float
    box_class_right: float
    outlines: float
    true_outlines: float
    named_alike: float
    named_exactly: float
    duplicates: float
    parsed: float
    truncated: float
    looped: float
    absolute_error: float


COLUMNS = {one.name: place for place, one in enumerate(fields(ImageCounts))}

COUNTS = frozenset({"misses", "duplicates"})  # figures that are whole numbers
SHARES_OF_IMAGES = {"parse_rate": "parsed", "truncated_rate": "truncated", "loop_rate": "looped"}
"""Figures that are shares of images, and the counts that they come from."""
OF_OUTLINES = ("box_f1@0.5", "box_f1_class@0.5", "outline_share", "true_outline_share")
"""Figures that say something only where objects are compared as masks."""
UNBOUNDED = frozenset({*COUNTS, "objects_per_truth", "counting_error"})
"""Figures that may be greater than 1."""


def image_counts(image: ScoredImage) -> ImageCounts:
    """Return the counts of one image."""
    boxes = image.as_boxes()
    same = same_class(image)
    pairs, judgeable = _matched(image, image.iou)
    class_pairs, class_judgeable = _matched(image, np.where(same, image.iou, 0.0))
    box_pairs, box_judgeable = _matched(boxes, boxes.iou)
    box_class_pairs, box_class_judgeable = _matched(boxes, np.where(same, boxes.iou, 0.0))
    named = [(image.answer.objects[a].desc, image.truth[t].desc) for a, t in pairs]
    true = [one for one, crowd in zip(image.truth, image.crowds, strict=True) if not crowd]
    return ImageCounts(
        images=1,
        truth=len(true),
        answered=len(image.names),
        judged=judgeable,
        right=len(pairs),
        class_judged=class_judgeable,
        class_right=len(class_pairs),
        box_judged=box_judgeable,
        box_right=len(box_pairs),
        box_class_judged=box_class_judgeable,
        box_class_right=len(box_class_pairs),
        outlines=sum(one.kind == "poly" for one in image.answer.objects),
        true_outlines=sum(one.kind == "poly" for one in true),
        named_alike=sum(normalised(one) == normalised(other) for one, other in named),
        named_exactly=sum(one == other for one, other in named),
        duplicates=int(image.duplicates.sum()),
        parsed=image.answer.parsed,
        truncated=image.answer.truncated,
        looped=image.answer.looped,
        absolute_error=abs(len(image.names) - len(true)),
    )


def _matched(image: ScoredImage, iou: FloatArray) -> tuple[list[tuple[int, int]], int]:
    """Return the matches of answered and true objects, and how many answered objects can be judged."""
    pairs = matches(iou[:, ~image.crowds])
    return pairs, int(judged(image, pairs, iou).sum())


def table_of(counts: list[ImageCounts]) -> FloatArray:
    """Return counts as (images, columns), the columns in the order of `COLUMNS`."""
    return np.array([[getattr(one, name) for name in COLUMNS] for one in counts], dtype=np.float64)


def figures(sums: FloatArray) -> dict[str, FloatArray]:
    """Return the figures of sums of counts, (..., columns): each of shape (...); NaN for a share of nothing."""
    total: Mapping[str, FloatArray] = {name: sums[..., place] for name, place in COLUMNS.items()}
    return {
        "f1@0.5": _ratio(2 * total["right"], total["judged"] + total["truth"]),
        "precision@0.5": _ratio(total["right"], total["judged"]),
        "recall@0.5": _ratio(total["right"], total["truth"]),
        "f1_class@0.5": _ratio(2 * total["class_right"], total["class_judged"] + total["truth"]),
        "precision_class@0.5": _ratio(total["class_right"], total["class_judged"]),
        "recall_class@0.5": _ratio(total["class_right"], total["truth"]),
        "box_f1@0.5": _ratio(2 * total["box_right"], total["box_judged"] + total["truth"]),
        "box_f1_class@0.5": _ratio(2 * total["box_class_right"], total["box_class_judged"] + total["truth"]),
        "outline_share": _ratio(total["outlines"], total["answered"]),
        "true_outline_share": _ratio(total["true_outlines"], total["truth"]),
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


def sample_f1(image: ScoredImage) -> float | None:
    """Return the class-aware F1 of one image; None where both truth and answer are empty."""
    return f1_of(image_counts(image))


def f1_of(counts: ImageCounts) -> float | None:
    """Return the class-aware F1 of an image's counts; None where both truth and answer are empty."""
    nothing = counts.class_judged + counts.truth == 0
    return None if nothing else float(figures(table_of([counts])[0])["f1_class@0.5"])


def rank_of(f1: float | None) -> float:
    """Return where an image ranks among others by its F1: with the best where there was nothing to find."""
    return 1.0 if f1 is None else f1


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
    """Return part / whole, and NaN where whole is 0."""
    return np.divide(part, whole, out=np.full_like(whole, np.nan, dtype=np.float64), where=whole != 0)
