"""How many objects a data file does not label, by what several sampled answers of a model agree on.

An agreed box on which no label lies is an object that the annotator may have left out. The model misses objects, too:
of the labelled ones it agrees on a share, and it is taken to agree on the same share of those without a label. So `n`
agreed boxes without a label stand for `n / share` objects. This holds where labels are missing whatever the object is;
where a kind of object is never labelled, the model has learnt to leave it out, and the estimate is too low. Boxes on
which a model agrees and that are no objects make it too high.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stage2_trainer.matching.geometry import box_iou
from stage2_trainer.matching.tokens import FloatArray

SAMPLES, AGREED = 4, 2
"""Answers to each image, and how many of them must list an object."""
SAME_IOU, APART_IOU = 0.5, 0.3
"""Boxes are of one object from the first on; a box is on no label below the second."""
DRAWS = 1000  # of the bootstrap


class Named(NamedTuple):
    """A box with its name: left, top, right and bottom in one unit for answers and labels."""

    desc: str
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Agreement:
    """What the answers to an image agree on: how many of its labels, and boxes on which no label lies."""

    labels: int
    found: int
    unlabelled: tuple[Named, ...]

    @classmethod
    def of_answers(cls, labels: Sequence[Named], answers: Sequence[Sequence[Named]]) -> Agreement:
        """Compare the labels of an image with the boxes that `AGREED` of the answers have."""
        boxes = list(agreed(answers, AGREED))
        overlap = _overlap(labels, boxes)
        found = int((overlap.max(axis=1, initial=0.0) >= SAME_IOU).sum())
        beside = overlap.max(axis=0, initial=0.0) < APART_IOU
        return cls(len(labels), found, tuple(box for box, alone in zip(boxes, beside, strict=True) if alone))


def agreed(answers: Sequence[Sequence[Named]], least: int) -> Iterator[Named]:
    """Yield a box for each object that `least` of the answers have: the median of theirs, with their commonest name."""
    groups: list[dict[int, Named]] = []  # by answer
    for number, answer in enumerate(answers):
        for one in answer:
            firsts = [next(iter(group.values())) for group in groups]
            near = _overlap([one], firsts)[0] >= SAME_IOU
            group = next((group for group, is_near in zip(groups, near, strict=True) if is_near), None)
            if group is None:
                groups.append({number: one})
            else:
                group.setdefault(number, one)
    for group in groups:
        if len(group) >= least:
            left, top, right, bottom = np.median([one.box for one in group.values()], axis=0).tolist()
            names = Counter(one.desc for one in group.values())
            yield Named(names.most_common(1)[0][0], (left, top, right, bottom))


@dataclass(frozen=True)
class Estimate:
    """Of all images: labels, those on which answers agree, and agreed boxes without a label.

    share: of all objects, those that no label names, with its 95 % interval over images; None where answers agree on
    no label, so that nothing can be said.
    """

    images: int
    labels: int
    found: int
    beside: int
    share: tuple[float, float, float] | None

    @classmethod
    def of_images(cls, images: Sequence[Agreement]) -> Estimate:
        """Add up what the answers to some images agree on."""
        counts = np.array([(one.labels, one.found, len(one.unlabelled)) for one in images]).reshape(-1, 3)
        labels, found, beside = (int(total) for total in counts.sum(axis=0))
        share = None
        if found:
            draws = np.random.default_rng(0).integers(len(images), size=(DRAWS, len(images)))
            low, high = np.nanquantile(_share(counts[draws].sum(axis=1)), (0.025, 0.975))
            share = (float(_share(counts.sum(axis=0))), float(low), float(high))
        return cls(len(images), labels, found, beside, share)


def _share(counts: FloatArray) -> FloatArray:
    """Return `unlabelled / (labels + unlabelled)` of counts (..., 3); nan where no label was found."""
    labels, found, beside = (counts[..., place].astype(float) for place in range(3))
    with np.errstate(divide="ignore", invalid="ignore"):
        unlabelled = np.where(found > 0, beside * labels / found, np.nan)
        share: FloatArray = unlabelled / (labels + unlabelled)
    return share


def _overlap(ones: Sequence[Named], others: Sequence[Named]) -> FloatArray:
    left, right = (np.array([one.box for one in boxes]).reshape(-1, 4) for boxes in (ones, others))
    return box_iou(left[:, None], right[None])
