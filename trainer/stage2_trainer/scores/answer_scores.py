"""The scores of one set of answers, with intervals by a bootstrap over images, and the difference of two sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from stage2_trainer.matching.tokens import FloatArray
from stage2_trainer.scores.average_precision import (
    ClassMatches,
    ImageMatches,
    average_precision,
    by_class,
    class_matches,
    image_matches,
)
from stage2_trainer.scores.image_counts import (
    COLUMNS,
    COUNTS,
    ImageCounts,
    figures,
    image_counts,
    table_of,
    worst_image,
)
from stage2_trainer.scores.scored_image import ScoredImage

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
        return cls([Examined.from_image(image) for image in images])

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
            **({} if resamples is None else {"intervals": intervals(self.resample(resamples), self.figures(every))}),
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
        found = [average_precision(self._matches, weights, by_size=False) for weights in resamples]
        precision = {name: np.array([one[name] for one in found]) for name in RESAMPLED}
        return {**precision, **figures(resamples @ self._counts)}

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
