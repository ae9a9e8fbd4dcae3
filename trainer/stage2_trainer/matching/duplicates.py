"""Objects of an answer that repeat an earlier one: found before matching, so that none of them becomes a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stage2_trainer.matching.assign import Matching, match
from stage2_trainer.matching.geometry import aabbs, box_iou
from stage2_trainer.matching.ground_truth import GTObject
from stage2_trainer.matching.options import MatchOptions
from stage2_trainer.matching.parsed_objects import ParsedObject


def duplicates(objects: Sequence[ParsedObject], least_iou: float | None) -> tuple[int, ...]:
    """Return which objects repeat an earlier one that is none itself: of its description, and in its place.

    least_iou: of their bounding boxes; None: nothing counts as repeated.
    """
    if least_iou is None:
        return ()
    boxes = aabbs(objects)
    names = np.unique([one.desc for one in objects], return_inverse=True)[1]
    kept = np.zeros(len(objects), dtype=np.bool_)
    for i in range(len(objects)):
        earlier = np.flatnonzero(kept[:i] & (names[:i] == names[i]))
        kept[i] = not bool((box_iou(boxes[i], boxes[earlier]) >= least_iou).any())
    return tuple(np.flatnonzero(~kept).tolist())


def match_others(
    pred: Sequence[ParsedObject], gt: Sequence[GTObject], repeated: Sequence[int], options: MatchOptions
) -> Matching:
    """Match all predictions but the repeated ones; these are unmatched."""
    if not repeated:
        return match(pred, gt, options)
    kept = np.setdiff1d(np.arange(len(pred)), repeated).tolist()
    found = match([pred[i] for i in kept], gt, options)
    return replace(
        found,
        pairs=tuple(replace(pair, pred=kept[pair.pred]) for pair in found.pairs),
        false_positives=tuple(sorted([*repeated, *(kept[i] for i in found.false_positives)])),
    )
