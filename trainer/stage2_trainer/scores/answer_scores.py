"""The scores of one set of answers, with intervals by a bootstrap over images, and the difference of two sets.

Average precision and recall equal those of pycocotools, and are fast enough for a bootstrap.

The objects of an image (`COCOeval.evaluateImg`) are matched once, for all thresholds and sizes together. Each
resampling then only counts these matches, with a weight for each image.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from stage2_trainer.matching.tokens import BoolArray, FloatArray
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.scores.image_counts import (
    COLUMNS,
    COUNTS,
    SHARES_OF_IMAGES,
    UNBOUNDED,
    ImageCounts,
    figures,
    image_counts,
    table_of,
    worst_image,
)
from stage2_trainer.scores.scored_image import ScoredImage

Places = npt.NDArray[np.int64]
THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
AREAS = {"all": (0.0, 1e10), "small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
MOST_DETECTIONS = 100  # of one class in one image
_LOWER, _UPPER = (np.array(ends)[:, None] for ends in zip(*AREAS.values(), strict=True))
_KINDS = (len(AREAS), len(THRESHOLDS))
_LIMITS = np.minimum(THRESHOLDS, 1 - 1e-10)[None, :, None]
_PLACES = np.indices(_KINDS)


@dataclass(frozen=True)
class ClassMatches:
    """The detections of one class, best first, and its true objects.

    image, true_image: the number of each one's image. matched, ignored: (detections, sizes, thresholds). counted:
    (true objects, sizes), those that must be found.
    """

    image: Places
    matched: BoolArray
    ignored: BoolArray
    true_image: Places
    counted: BoolArray

    def curves(self, weights: FloatArray, areas: int) -> tuple[FloatArray, FloatArray]:
        """Return average precision and final recall, (sizes, thresholds), of the first sizes; NaN without an object.

        weights: how often each image counts.
        """
        precision, recall = (np.full((areas, len(THRESHOLDS)), np.nan) for _ in range(2))
        positives = weights[self.true_image] @ self.counted[:, :areas].astype(np.float64)
        weight = weights[self.image][:, None, None]
        matched, ignored = self.matched[:, :areas], self.ignored[:, :areas]
        right = np.cumsum(weight * (matched & ~ignored), axis=0)
        wrong = np.cumsum(weight * (~matched & ~ignored), axis=0)
        share = right / (right + wrong + np.spacing(1))
        share = np.maximum.accumulate(share[::-1], axis=0)[::-1]
        for area in np.flatnonzero(positives):
            found = right[:, area] / positives[area]
            recall[area] = found[-1] if len(found) else 0.0
            precision[area] = [_interpolated(found[:, t], share[:, area, t]) for t in range(len(THRESHOLDS))]
        return precision, recall


@dataclass(frozen=True)
class ImageMatches:
    """The objects of one class in one image; see `ClassMatches`."""

    scores: FloatArray
    matched: BoolArray
    ignored: BoolArray
    counted: BoolArray


def image_matches(image: ScoredImage) -> dict[str, ImageMatches]:
    """Return the matches in one image, by class."""
    return {
        name: _match(image, np.array(answered, dtype=np.int64), np.array(true, dtype=np.int64))
        for name, (answered, true) in _by_class(image).items()
        if name in image.known
    }


def class_matches(images: Sequence[Mapping[str, ImageMatches]]) -> dict[str, ClassMatches]:
    """Return the matches of each class that has a true object, by name. images: the matches in each image."""
    parts: dict[str, list[tuple[int, ImageMatches]]] = defaultdict(list)
    for number, found in enumerate(images):
        for name, one in found.items():
            parts[name].append((number, one))
    true = sorted(name for name, found in parts.items() if any(len(one.counted) for _, one in found))
    return {name: _joined(parts[name]) for name in true}


def average_precision(
    matches: Mapping[str, ClassMatches], weights: FloatArray, *, by_size: bool = True
) -> dict[str, float]:
    """Return AP, AP50, AP75 and AR, and those of small, medium and large objects; NaN where there are none."""
    precision, recall = _stacked(matches, weights, len(AREAS) if by_size else 1)
    found = {"AP": precision[:, 0], "AP50": precision[:, 0, 0], "AP75": precision[:, 0, 5], "AR": recall[:, 0]}
    for place, size in list(enumerate(AREAS))[1:] if by_size else ():
        found |= {f"AP_{size}": precision[:, place], f"AR_{size}": recall[:, place]}
    return {key: _mean(values) for key, values in found.items()}


def by_class(matches: Mapping[str, ClassMatches], weights: FloatArray) -> dict[str, dict[str, float]]:
    """Return AP, AP50, AP75, AR and the number of true objects of each class."""
    return {
        name: {**average_precision({name: found}, weights, by_size=False), "objects": int(found.counted[:, 0].sum())}
        for name, found in matches.items()
    }


def _by_class(image: ScoredImage) -> dict[str, tuple[list[int], list[int]]]:
    found: dict[str, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for place, name in enumerate(image.names):
        if not image.unchecked[place]:
            found[name][0].append(place)
    for place, name in enumerate(image.true_names):
        found[name][1].append(place)
    return found


def _match(image: ScoredImage, answered: Places, true: Places) -> ImageMatches:
    order = answered[np.argsort(-image.scores[answered], kind="stable")][:MOST_DETECTIONS]
    areas, crowds = image.true_areas[true], image.crowds[true]
    skipped = crowds | (areas < _LOWER) | (areas > _UPPER)  # (sizes, true objects)
    matched, ignored = _greedy(image.iou[order][:, true], skipped, crowds)
    size = image.answered_areas[order]
    outside = ((size < _LOWER) | (size > _UPPER)).T[:, :, None] | image.in_loose_classes[order][:, None, None]
    return ImageMatches(image.scores[order], matched, ignored | (~matched & outside), ~skipped.T)


def _greedy(iou: FloatArray, skipped: BoolArray, crowds: BoolArray) -> tuple[BoolArray, BoolArray]:
    """Match detections in their order, each to the true object that it overlaps most.

    Skipped objects (crowds, those of another size) are matched only if there is no other; of equal overlaps the last
    counts. Returns which detections were matched, and which of these to a skipped object.
    """
    detections, true = iou.shape
    matched, ignored = (np.zeros((detections, *_KINDS), dtype=bool) for _ in range(2))
    if not true:
        return matched, ignored
    used = np.zeros((*_KINDS, true), dtype=bool)
    areas, thresholds = _PLACES
    for place in np.flatnonzero(iou.max(1) >= THRESHOLDS[0]):
        free = (iou[place] >= _LIMITS) & (~used | crowds)
        first = free & ~skipped[:, None, :]
        free = np.where(first.any(-1, keepdims=True), first, free)
        best = true - 1 - np.argmax(np.where(free, iou[place], -1.0)[..., ::-1], axis=-1)
        found = free.any(-1)
        used[areas[found], thresholds[found], best[found]] = True
        matched[place] = found
        ignored[place] = found & skipped[areas, best]
    return matched, ignored


def _joined(numbered: Sequence[tuple[int, ImageMatches]]) -> ClassMatches:
    numbers, parts = zip(*numbered, strict=True)
    scores = np.concatenate([one.scores for one in parts])
    order = np.argsort(-scores, kind="stable")
    image = np.repeat(numbers, [len(one.scores) for one in parts])
    return ClassMatches(
        image=image[order],
        matched=np.concatenate([one.matched for one in parts])[order],
        ignored=np.concatenate([one.ignored for one in parts])[order],
        true_image=np.repeat(numbers, [len(one.counted) for one in parts]),
        counted=np.concatenate([one.counted for one in parts]),
    )


def _stacked(matches: Mapping[str, ClassMatches], weights: FloatArray, areas: int) -> tuple[FloatArray, FloatArray]:
    curves = [found.curves(weights, areas) for found in matches.values()]
    if not curves:
        empty = np.full((1, areas, len(THRESHOLDS)), np.nan)
        return empty, empty
    return np.stack([precision for precision, _ in curves]), np.stack([recall for _, recall in curves])


def _interpolated(recall: FloatArray, precision: FloatArray) -> float:
    """Return the mean of the precision at 101 recalls, 0 beyond the last."""
    places = np.searchsorted(recall, RECALLS, side="left")
    return float(np.append(precision, 0.0)[places].mean())


def _mean(values: FloatArray) -> float:
    """Return the mean of known values, as pycocotools leaves -1 out."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


PERCENTILES = (2.5, 97.5)
WITHOUT_DUPLICATES = "without_duplicates"
REPEATED = ("AP", "AP50", "AP75", "AR", "f1@0.5", "precision@0.5", "f1_class@0.5", "precision_class@0.5")
"""Figures that are also given for answers without their duplicates."""
RESAMPLED = ("AP", "AP50", "AP75", "AR")
COORDINATE_SCORES, EQUAL_SCORES = "coordinate_logprobs", "equal"


@dataclass(frozen=True)
class Examined:
    """An image with its counts and its matches by class."""

    image: ScoredImage
    counts: ImageCounts
    matches: Mapping[str, ImageMatches]

    @classmethod
    def from_image(cls, image: ScoredImage) -> Examined:
        """Count and match the objects of an image."""
        return cls(image, image_counts(image), image_matches(image))

    def without_duplicates(self) -> Examined:
        """Return the same for the answer without duplicates."""
        kept = self.image.without_duplicates()
        return self if kept is self.image else Examined.from_image(kept)


@dataclass(frozen=True)
class AnswerScores:
    """The scores of a set of answers, one for each image."""

    examined: Sequence[Examined] = field(repr=False)

    @classmethod
    def from_images(cls, images: Sequence[ScoredImage]) -> AnswerScores:
        """Return the scores of these answers."""
        examined = []
        with ACTIVITY.doing("scoring", len(images), "images") as scoring:
            for image in images:
                examined.append(Examined.from_image(image))
                scoring.advance()
        return cls(examined)

    @property
    def images(self) -> list[ScoredImage]:
        """The records with their answers."""
        return [one.image for one in self.examined]

    def document(self, resamples: FloatArray | None = None) -> dict[str, Any]:
        """Return all figures for JSON. resamples: (draws, images), for the intervals; None leaves them out."""
        every = np.ones(len(self.examined))
        worst = self.examined[worst_image(self._counts)]
        return {
            **{name: int(value) if name in COUNTS else value for name, value in self.figures(every).items()},
            "images": len(self.examined),
            "objects": int(self._counts[:, COLUMNS["truth"]].sum()),
            "predictions": int(self._counts[:, COLUMNS["answered"]].sum()),
            "scores_from": self.scores_from,
            "overlap_of": "masks" if any(image.masks for image in self.images) else "boxes",
            "by_class": by_class(self._matches, every),
            WITHOUT_DUPLICATES: self._without_duplicates(),
            "worst_image": {
                "sample_id": worst.image.sample_id,
                **{name: _plain(value) for name, value in _figures_of_image(worst).items()},
            },
            **({} if resamples is None else {"intervals": self.intervals(resamples)}),
        }

    @property
    def scores_from(self) -> str:
        """What ranks the objects for AP."""
        with_any = [image for image in self.images if image.names]
        ranked = bool(with_any) and all(image.answer.scores is not None for image in with_any)
        return COORDINATE_SCORES if ranked else EQUAL_SCORES

    def figures(self, weights: FloatArray) -> dict[str, float]:
        """Return the figures with a weight for each image."""
        precision = average_precision(self._matches, weights)
        counted = figures(weights @ self._counts)
        return {**precision, **{name: float(value) for name, value in counted.items()}}

    def resample(self, resamples: FloatArray) -> dict[str, FloatArray]:
        """Return the figures of each draw, (draws,) each."""
        found = []
        with ACTIVITY.doing("computing intervals", len(resamples), "resamples") as computing:
            for weights in resamples:
                found.append(average_precision(self._matches, weights, by_size=False))
                computing.advance()
        precision = {name: np.array([one[name] for one in found]) for name in RESAMPLED}
        return {**precision, **figures(resamples @ self._counts)}

    def intervals(self, resamples: FloatArray) -> dict[str, list[float]]:
        """Return the 95 % interval of each figure: Wilson's for shares of images, else that of the draws."""
        from scipy.stats import binomtest  # half of scipy, which a learner's start does without

        found = bounded(intervals(self.resample(resamples), self.figures(np.ones(len(self.examined)))))
        for name, column in SHARES_OF_IMAGES.items():
            share = binomtest(int(self._counts[:, COLUMNS[column]].sum()), len(self.examined))
            found[name] = [float(end) for end in share.proportion_ci(method="wilson")]
        return found

    def _without_duplicates(self) -> dict[str, float]:
        kept = AnswerScores([one.without_duplicates() for one in self.examined])
        found = kept.figures(np.ones(len(self.examined)))
        return {name: found[name] for name in REPEATED}

    @cached_property
    def _matches(self) -> Mapping[str, ClassMatches]:
        return class_matches([one.matches for one in self.examined])

    @cached_property
    def _counts(self) -> FloatArray:
        return table_of([one.counts for one in self.examined])


def bootstrap_weights(images: int, *, draws: int, seed: int) -> FloatArray:
    """Return how often each image counts in each draw of a bootstrap, (draws, images)."""
    chance = np.full(images, 1 / images)
    return np.random.default_rng(seed).multinomial(images, chance, size=draws).astype(np.float64)


def intervals(resampled: Mapping[str, FloatArray], figures: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the 95 % interval of each figure that all draws have.

    The percentiles of the draws are shifted by the difference of their mean from the figure: an image that is drawn
    twice bends AP's curve upwards, so its draws are biased by more than they spread.
    """
    kept = {name: values for name, values in resampled.items() if not np.isnan(values).any()}
    return {
        name: [float(end) for end in np.percentile(values, PERCENTILES) - values.mean() + figures[name]]
        for name, values in kept.items()
    }


def bounded(found: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return intervals of figures without what no figure can be: below 0, or above 1 where it is a share."""
    return {
        name: [float(end) for end in np.clip(ends, 0.0, None if name in UNBOUNDED else 1.0)]
        for name, ends in found.items()
    }


def differences(first: AnswerScores, other: AnswerScores, resamples: FloatArray) -> dict[str, dict[str, Any]]:
    """Return by how much the other set is higher than the first, for each figure, with its interval.

    Both are resampled with the same images: what is hard for both does not widen the interval.
    """
    every = np.ones(len(first.examined))
    mine, theirs = first.figures(every), other.figures(every)
    before, after = first.resample(resamples), other.resample(resamples)
    apart = {name: theirs[name] - mine[name] for name in before}
    spread = intervals({name: after[name] - before[name] for name in before}, apart)
    return {
        name: {"difference": apart[name], "interval": interval}
        for name, interval in spread.items()
        if not math.isnan(apart[name])
    }


def without_nan(value: Any) -> Any:
    """Return a document with null in place of NaN, for JSON."""
    if isinstance(value, dict):
        return {key: without_nan(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_nan(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _figures_of_image(one: Examined) -> dict[str, float]:
    counts = one.counts
    found = figures(table_of([counts])[0])
    named = {name: float(found[name]) for name in ("f1_class@0.5", "f1@0.5", "misses", "duplicates")}
    return {**named, "objects": counts.truth, "predictions": counts.answered}


def _plain(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
