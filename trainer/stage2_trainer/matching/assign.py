"""Assignment of predicted objects to true ones: options, candidates, a gate, matches that may leave objects out.

Source: semantics, sections 3, 4.4, 4.5 and 20; assignment: Kuhn-Munkres as in `scipy.optimize.linear_sum_assignment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from stage2_api.rollout_matching import (
    Assignment,
    MaskIouMode,
    OtBboxTarget,
    OtCost,
    OtEpsilonMode,
    RolloutMatching,
    UnmatchedObjects,
)
from stage2_trainer.matching.geometry import Shape, aabbs, box_iou, mask_iou
from stage2_trainer.matching.ground_truth import GTObject
from stage2_trainer.matching.parse import ParsedObject
from stage2_trainer.matching.tokens import FloatArray, IntArray

_CONFIG = RolloutMatching()


@dataclass(frozen=True)
class MatchOptions:
    """The options of matching predicted objects to ground truth, and of supervising them.

    Each is described at the key of its name in `stage2_api.rollout_matching`.
    """

    assignment: Assignment = _CONFIG.assignment
    candidate_top_k: int = _CONFIG.candidate_top_k
    maskiou_gate: float = _CONFIG.maskiou_gate
    maskiou_resolution: int = _CONFIG.maskiou_resolution
    fp_cost: float = _CONFIG.fp_cost
    fn_cost: float = _CONFIG.fn_cost
    ot_cost: OtCost = _CONFIG.ot_cost
    ot_epsilon: float = _CONFIG.ot_epsilon
    ot_iters: int = _CONFIG.ot_iters
    maskiou_mode: MaskIouMode = _CONFIG.maskiou_mode
    ot_epsilon_mode: OtEpsilonMode = _CONFIG.ot_epsilon_mode
    ot_bbox_target: OtBboxTarget = _CONFIG.ot_bbox_target
    matched_text_weight: float = _CONFIG.matched_text_weight
    missed_desc_weight: float = _CONFIG.missed_desc_weight
    duplicate_iou: float | None = _CONFIG.duplicate_iou
    unmatched_objects: UnmatchedObjects = _CONFIG.unmatched_objects
    unmatched_weight: float = _CONFIG.unmatched_weight

    @classmethod
    def from_config(cls, rollout_matching: RolloutMatching) -> MatchOptions:
        """Return the options of `custom.extra.rollout_matching`."""
        return cls(**{field.name: getattr(rollout_matching, field.name) for field in fields(cls)})


DEFAULTS = MatchOptions()
INFEASIBLE = 1e6


@dataclass(frozen=True)
class Pair:
    """A predicted and a true object: their indices, their IoU, and their cost, 1 - IoU.

    The IoU is that of masks for a match, and that of boxes for a box that follows.
    """

    pred: int
    gt: int
    iou: float
    cost: float


@dataclass(frozen=True)
class Matching:
    """All matches (by prediction), the indices of either side without a match, and the counts of the gate.

    following: boxes without a match that are trained towards a true one without a match; only a dynamic assignment has
    any. They find nothing, so both stay false in the figures.
    """

    pairs: tuple[Pair, ...]
    false_positives: tuple[int, ...]
    false_negatives: tuple[int, ...]
    gating_rejections: int
    candidates: int
    following: tuple[Pair, ...] = ()

    @property
    def supervised(self) -> tuple[Pair, ...]:
        """Matches and boxes that follow, by prediction: what has coordinate targets."""
        return tuple(sorted((*self.pairs, *self.following), key=lambda pair: pair.pred))

    @property
    def unmatched(self) -> tuple[int, ...]:
        """Predictions that neither match nor follow a true object."""
        follows = {pair.pred for pair in self.following}
        return tuple(i for i in self.false_positives if i not in follows)

    @property
    def missed(self) -> tuple[int, ...]:
        """True objects that no prediction matches or follows: those that are appended."""
        followed = {pair.gt for pair in self.following}
        return tuple(i for i in self.false_negatives if i not in followed)


def match(pred: Sequence[Shape], gt: Sequence[Shape], options: MatchOptions = DEFAULTS) -> Matching:
    """Match predictions to ground truth at the least total cost. Deterministic; scipy's order breaks ties."""
    pairs = candidate_pairs(aabbs(pred), aabbs(gt), options.candidate_top_k)
    iou = mask_iou(pred, gt, pairs, resolution=options.maskiou_resolution, mode=options.maskiou_mode)
    passed = iou >= options.maskiou_gate
    overlaps = np.full((len(pred), len(gt)), np.nan)
    overlaps[tuple(pairs[passed].T)] = iou[passed]
    rows, columns = assign(1.0 - overlaps, fp_cost=options.fp_cost, fn_cost=options.fn_cost)
    found = [
        Pair(pred=int(i), gt=int(j), iou=float(overlaps[i, j]), cost=float(1.0 - overlaps[i, j]))
        for i, j in zip(rows, columns, strict=True)
    ]
    return Matching(
        pairs=tuple(found),
        false_positives=_remaining(len(pred), rows),
        false_negatives=_remaining(len(gt), columns),
        gating_rejections=int(np.count_nonzero(~passed)),
        candidates=len(pairs),
    )


def follow(
    pred: Sequence[ParsedObject], gt: Sequence[GTObject], found: Matching, repeated: Sequence[int]
) -> tuple[Matching, dict[int, tuple[int, ...]]]:
    """Let each box without a match follow the free true box nearest to its coordinates so far.

    Returns the matching with the boxes that follow, and the labels of their four coordinates: a coordinate's label is
    that of the free true box nearest to the coordinates before it, and for the first one to itself. Repeated boxes do
    not follow, and no box does where there is a polygon. A dynamic oracle, as in Goldberg and Nivre (2012). Source:
    semantics, section 20.
    """
    if "poly" in {one.kind for one in pred} | {one.kind for one in gt}:
        return found, {}
    free, pairs, labels = list(found.false_negatives), [], {}
    for i in [i for i in found.false_positives if i not in repeated][: len(free)]:
        true = np.asarray([gt[j].bins for j in free])
        distances = np.abs(true - np.asarray(pred[i].bins)).cumsum(axis=1)
        nearest = distances[:, [0, 0, 1, 2]].argmin(axis=0)
        labels[i] = tuple(true[nearest, np.arange(4)].tolist())
        j = free.pop(nearest[-1])
        iou = float(box_iou(aabbs([pred[i]]), aabbs([gt[j]]))[0])
        pairs.append(Pair(i, j, iou, 1 - iou))
    return replace(found, following=tuple(pairs)), labels


def match_except(
    pred: Sequence[ParsedObject], gt: Sequence[GTObject], repeated: Sequence[int], options: MatchOptions
) -> Matching:
    """Match all predictions except the repeated ones, which stay unmatched."""
    if not repeated:
        return match(pred, gt, options)
    kept = np.setdiff1d(np.arange(len(pred)), repeated).tolist()
    found = match([pred[i] for i in kept], gt, options)
    return replace(
        found,
        pairs=tuple(replace(pair, pred=kept[pair.pred]) for pair in found.pairs),
        false_positives=tuple(sorted([*repeated, *(kept[i] for i in found.false_positives)])),
    )


def duplicates(objects: Sequence[ParsedObject], least_iou: float | None) -> tuple[int, ...]:
    """Return which objects repeat an earlier one that is not a duplicate itself: same description, same place.

    least_iou: of their bounding boxes; None: there are no duplicates.
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


def candidate_pairs(pred: IntArray, gt: IntArray, top_k: int) -> IntArray:
    """Return the `top_k` true boxes to compare with each predicted box: index pairs (K, 2), ordered by prediction.

    pred (P, 4) and gt (G, 4) in bins. Overlapping boxes come first, by decreasing IoU, and then the others by distance
    between centres; ties by index.
    """
    count = min(max(top_k, 1), len(gt))
    if len(pred) == 0 or count == 0:
        return np.zeros((0, 2), dtype=np.int64)
    iou = box_iou(pred[:, None], gt[None])
    rank = np.where(iou > 0, -iou, _centre_distances(pred[:, None], gt[None]))
    best = np.argsort(rank, axis=1, kind="stable")[:, :count]
    return np.stack([np.repeat(np.arange(len(pred)), count), best.ravel()], axis=1)


def assign(costs: FloatArray, *, fp_cost: float, fn_cost: float) -> tuple[IntArray, IntArray]:
    """Return the rows and columns of the matches that minimise the total cost.

    costs (P, G), NaN where a pair is infeasible. The square matrix of size P + G prices an unmatched row at `fp_cost`
    and an unmatched column at `fn_cost`, so a pair is matched only while its cost is below `fp_cost + fn_cost`.
    """
    # takes a second of CPU time, and readers of records import this module too
    from scipy.optimize import linear_sum_assignment

    rows, columns = costs.shape
    feasible = np.isfinite(costs)
    square = np.zeros((rows + columns, rows + columns))
    square[:rows, :columns] = np.where(feasible, costs, INFEASIBLE)
    square[:rows, columns:] = fp_cost
    square[rows:, :columns] = fn_cost
    chosen_rows, chosen_columns = linear_sum_assignment(square)
    inside = (chosen_rows < rows) & (chosen_columns < columns)
    pairs = np.stack([chosen_rows[inside], chosen_columns[inside]])
    pairs = pairs[:, feasible[tuple(pairs)]]
    return pairs[0], pairs[1]


def _centre_distances(left: IntArray, right: IntArray) -> IntArray:
    """Return four times the squared distance of centres: corner sums are whole, so equal distances compare equal."""
    x = left[..., 0] + left[..., 2] - right[..., 0] - right[..., 2]
    y = left[..., 1] + left[..., 3] - right[..., 1] - right[..., 3]
    return x * x + y * y


def _remaining(count: int, matched: IntArray) -> tuple[int, ...]:
    return tuple(np.setdiff1d(np.arange(count), matched).tolist())
