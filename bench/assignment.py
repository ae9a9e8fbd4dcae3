"""Candidate search, assignment and the whole match against plain O(P·G) loops, and against pycocotools' IoU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from bench.overlap import coco_peers
from bench.scenes import all_pairs, scene
from bench.tables import Row, Table, seconds
from scipy.optimize import linear_sum_assignment

from stage2_trainer.matching import match
from stage2_trainer.matching.assign import DEFAULTS, INFEASIBLE, assign, candidate_pairs
from stage2_trainer.matching.geometry import aabbs, mask_iou

SIZES = (100, 300)
Boxes = list[list[int]]
Costs = list[list[float | None]]


def rows() -> Iterator[Row]:
    """Each part against its loop, then the whole against pycocotools."""
    for count in SIZES:
        yield candidate_row(count)
        yield assignment_row(count)
    for count, share in ((100, 0.0), (100, 0.3), (100, 1.0), (300, 0.3)):
        yield from match_rows(count, share)


def candidate_row(count: int) -> Row:
    """Candidate search against the double loop."""
    pred, gt = (aabbs(side) for side in scene(count, 0.5))
    found, plain = candidate_pairs(pred, gt, 10), looped_candidates(pred.tolist(), gt.tolist(), 10)
    ours = seconds(lambda: candidate_pairs(pred, gt, 10))
    theirs = seconds(lambda: looped_candidates(pred.tolist(), gt.tolist(), 10))
    return Row(f"candidates, {count} x {count}", "plain double loop", ours, theirs, differs(plain, found.tolist()))


def assignment_row(count: int) -> Row:
    """Building and solving the square matrix against a double loop that builds it."""
    pred, gt = scene(count, 0.5)
    costs = np.full((count, count), np.nan)
    pairs = candidate_pairs(aabbs(pred), aabbs(gt), 10)
    costs[tuple(pairs.T)] = 1 - mask_iou(pred, gt, pairs)
    costs[costs > 1 - DEFAULTS.maskiou_gate] = np.nan
    listed = [[None if np.isnan(cost) else float(cost) for cost in row] for row in costs]
    found = [side.tolist() for side in assign(costs, fp_cost=1.0, fn_cost=1.0)]
    ours = seconds(lambda: assign(costs, fp_cost=1.0, fn_cost=1.0))
    theirs = seconds(lambda: looped_assignment(listed))
    difference = differs(found, looped_assignment(listed))
    return Row(f"assignment, {count} x {count}", "plain double loop, then scipy", ours, theirs, difference)


def match_rows(count: int, share: float) -> Iterator[Row]:
    """The whole match against nothing but the IoU of pycocotools, of all pairs and of our candidates alone."""
    pred, gt = scene(count, share)
    what = f"match, {count} x {count}, {share:.0%} polygons"
    ours = seconds(lambda: match(pred, gt))
    candidates = candidate_pairs(aabbs(pred), aabbs(gt), DEFAULTS.candidate_top_k)
    for which, pairs in (("all pairs", all_pairs(count)), ("candidates only", candidates)):
        for peer, call in coco_peers(pred, gt, pairs):
            yield Row(what, f"{peer}, IoU of {which}", ours, seconds(call))


def looped_candidates(pred: Boxes, gt: Boxes, top_k: int) -> list[list[int]]:
    """The candidate rule as one would write it without numpy."""
    pairs = []
    for i, (a0, b0, a1, b1) in enumerate(pred):
        ranked = []
        for j, (c0, d0, c1, d1) in enumerate(gt):
            shared = max(0, min(a1, c1) - max(a0, c0)) * max(0, min(b1, d1) - max(b0, d0))
            union = (a1 - a0) * (b1 - b0) + (c1 - c0) * (d1 - d0) - shared
            apart = (a0 + a1 - c0 - c1) ** 2 + (b0 + b1 - d0 - d1) ** 2
            ranked.append((-shared / union if shared > 0 else apart, j))
        pairs += [[i, j] for _, j in sorted(ranked)[:top_k]]
    return pairs


def looped_assignment(costs: Costs) -> list[list[int]]:
    """The square matrix filled entry by entry, solved by scipy."""
    count, columns = len(costs), len(costs[0])
    square = [[0.0] * (count + columns) for _ in range(count + columns)]
    for i in range(count):
        for j in range(columns):
            cost = costs[i][j]
            square[i][j] = INFEASIBLE if cost is None else cost
        for j in range(columns, count + columns):
            square[i][j] = 1.0
    for i in range(count, count + columns):
        for j in range(columns):
            square[i][j] = 1.0
    chosen = [(i, j) for i, j in zip(*map(np.ndarray.tolist, linear_sum_assignment(square)), strict=True)]
    kept = [(i, j) for i, j in chosen if i < count and j < columns and costs[i][j] is not None]
    return [[i for i, _ in kept], [j for _, j in kept]]


def differs(left: object, right: object) -> str:
    """What the table says of two results that should be equal."""
    return "0" if left == right else "differs"


TABLE = Table("Candidates, assignment, match", "ms", 1e3, rows)
