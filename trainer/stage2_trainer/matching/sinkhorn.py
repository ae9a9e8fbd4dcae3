"""Coordinate targets of matched objects: entropic optimal transport between two point sets, projected barycentrically.

Sinkhorn's iterations in log space (Cuturi 2013; Peyre and Cuturi, Computational Optimal Transport, section 4.4), stable
for any regularisation. All pairs of one answer run at once. Source: semantics, section 4.5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from stage2_api.coordinates import BINS, MAX_BIN
from stage2_api.rollout_matching import OtCost
from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.geometry import Shape, aabbs, points_of
from stage2_trainer.matching.tokens import BoolArray, FloatArray

_NO_EPSILON = 1.0


def target_bins(pairs: Sequence[tuple[Shape, Shape]], options: MatchOptions) -> list[tuple[int, ...]]:
    """Return the target bins of predicted coordinates, for pairs of (prediction, truth); one for each coordinate.

    Two boxes: the true bins, slot by slot. If a polygon is involved: the barycentric projection of the prediction's
    points onto those of the truth; for a predicted box, the bounding box of the projection.
    """
    by_transport = [i for i, (pred, gt) in enumerate(pairs) if not _is_direct(pred, gt, options)]
    projected = dict(zip(by_transport, _projections([pairs[i] for i in by_transport], options), strict=True))
    return [_to_bins(pred, projected[i]) if i in projected else _direct(gt) for i, (pred, gt) in enumerate(pairs)]


def barycentric(
    points: Sequence[FloatArray],
    targets: Sequence[FloatArray],
    epsilon: FloatArray,
    *,
    cost: OtCost = "l2",
    iterations: int = 30,
) -> list[FloatArray]:
    """Return the transport plan's weighted mean of the target points, for each point.

    points: B arrays (N_b, 2); targets: B arrays (M_b, 2); epsilon (B,) > 0, in the unit of the points; uniform
    marginals. Returns B arrays (N_b, 2).
    """
    projected: list[FloatArray] = [np.zeros((0, 2))] * len(points)
    for group in _group_by_size([(len(one), len(other)) for one, other in zip(points, targets, strict=True)]):
        x, x_here = _padded([points[b] for b in group])
        y, y_here = _padded([targets[b] for b in group])
        kernel = -_distances(x, y, cost) / epsilon[group, None, None]
        kernel = np.where(x_here[:, :, None] & y_here[:, None, :], kernel, -np.inf)
        plan = _plan_rows(kernel, x_here, y_here, max(iterations, 1))
        for b, moved in zip(group, plan @ y, strict=True):
            projected[b] = moved[: len(points[b])]
    return projected


def _is_direct(pred: Shape, gt: Shape, options: MatchOptions) -> bool:
    return pred.kind == "bbox" and (gt.kind == "bbox" or options.ot_bbox_target == "aabb")


def _direct(gt: Shape) -> tuple[int, ...]:
    if gt.kind == "bbox":
        return tuple(np.clip(gt.bins, 0, MAX_BIN).tolist())
    return tuple(aabbs([gt])[0].tolist())


def _to_bins(pred: Shape, projected: FloatArray) -> tuple[int, ...]:
    if pred.kind == "bbox":
        projected = np.stack([projected.min(axis=0), projected.max(axis=0)])
    return tuple(np.clip(np.rint(projected), 0, MAX_BIN).astype(np.int64).ravel().tolist())


def _projections(pairs: Sequence[tuple[Shape, Shape]], options: MatchOptions) -> list[FloatArray]:
    points = [points_of(pred).astype(np.float64) for pred, _ in pairs]
    targets = [points_of(gt).astype(np.float64) for _, gt in pairs]
    epsilon = _epsilon(targets, options)
    return barycentric(points, targets, epsilon, cost=options.ot_cost, iterations=options.ot_iters)


def _epsilon(targets: Sequence[FloatArray], options: MatchOptions) -> FloatArray:
    """Return the regularisation of each pair in bins; an unusable value counts as 1 (semantics, section 3)."""
    usable = math.isfinite(options.ot_epsilon) and options.ot_epsilon > 0
    epsilon = options.ot_epsilon if usable else _NO_EPSILON
    if options.ot_epsilon_mode == "bins":
        return np.full(len(targets), epsilon)
    diagonals = np.array([np.hypot(*np.ptp(one, axis=0)) for one in targets])
    scaled: FloatArray = epsilon / BINS * np.maximum(diagonals, 1.0)
    return scaled


def _group_by_size(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Group pairs whose sizes agree within a factor of two, so that padding wastes little."""
    groups: dict[tuple[int, int], list[int]] = {}
    for b, (n, m) in enumerate(sizes):
        groups.setdefault((n.bit_length(), m.bit_length()), []).append(b)
    return list(groups.values())


def _padded(arrays: Sequence[FloatArray]) -> tuple[FloatArray, BoolArray]:
    """Stack point sets to (B, N, 2); also return which points are real (B, N)."""
    sizes = np.array([len(one) for one in arrays])
    here = np.arange(sizes.max()) < sizes[:, None]
    stacked = np.zeros((*here.shape, 2))
    stacked[here] = np.concatenate(arrays)
    return stacked, here


def _distances(x: FloatArray, y: FloatArray, cost: OtCost) -> FloatArray:
    apart = x[:, :, None] - y[:, None, :]
    apart = np.abs(apart) if cost == "l1" else np.square(apart)
    total: FloatArray = apart.sum(axis=-1)
    return total if cost == "l1" else np.sqrt(total)


def _plan_rows(kernel: FloatArray, x_here: BoolArray, y_here: BoolArray, iterations: int) -> FloatArray:
    """Return the transport plan (B, N, M) after `iterations` rounds, each row scaled to sum 1 (rows of padding: 0).

    kernel (B, N, M): -cost / epsilon, -inf at padding.
    """
    log_a = -np.log(x_here.sum(axis=1))[:, None, None]
    log_b = -np.log(y_here.sum(axis=1))[:, None, None]
    log_v = np.zeros((len(kernel), 1, kernel.shape[2]))
    for _ in range(iterations):
        log_u = np.where(x_here[:, :, None], log_a - _logsumexp(kernel + log_v, axis=2), 0.0)
        log_v = np.where(y_here[:, None, :], log_b - _logsumexp(kernel + log_u, axis=1), 0.0)
    rows = kernel + log_v
    return np.where(x_here[:, :, None], np.exp(rows - _logsumexp(rows, axis=2)), 0.0)


def _logsumexp(values: FloatArray, axis: int) -> FloatArray:
    """Return the log of the sum of exponentials along one axis, which is kept; padding (all -inf) gives 0."""
    greatest = values.max(axis=axis, keepdims=True)
    greatest = np.where(np.isfinite(greatest), greatest, 0.0)
    total = np.exp(values - greatest).sum(axis=axis, keepdims=True)
    log_total: FloatArray = np.log(np.where(total > 0, total, 1.0)) + greatest
    return log_total
