"""What became of each object of an image: which answered ones are right, and which true ones were found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from stage2_trainer.scores.image_counts import CLOSE, matches, same_class
from stage2_trainer.scores.scored_image import ScoredImage

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
