"""The choice of a bias against closing the list, from the figures of answers under several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

CHOSEN_BY = "f1@0.5"


def objects_per_image(document: Mapping[str, Any]) -> float:
    """Return how many objects the answers of a set have in the mean."""
    return float(document["predictions"] / document["images"])


def best_bias(documents: Sequence[Mapping[str, Any]], wanted: float | None) -> int | None:
    """Return the place of the best set of answers; of equal ones, the first. None where no set has an F1.

    documents: the figures of each set. wanted: objects per image; the nearest is the best. None: the highest F1 is.
    """
    if wanted is not None:
        return min(range(len(documents)), key=lambda place: abs(objects_per_image(documents[place]) - wanted))
    scored = [place for place, one in enumerate(documents) if not math.isnan(one[CHOSEN_BY])]
    return max(scored, key=lambda place: float(documents[place][CHOSEN_BY]), default=None)
