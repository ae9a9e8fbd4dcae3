"""Mask IoU against pycocotools (the same canvas) and shapely (exact areas, so beside our exact modes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from bench.scenes import all_pairs, scene
from bench.tables import Row, Table, installed, seconds

from stage2_api.coordinates import BINS
from stage2_api.rollout_matching import MaskIouMode
from stage2_trainer.matching import GTObject
from stage2_trainer.matching.assign import DEFAULTS, candidate_pairs
from stage2_trainer.matching.geometry import aabbs, mask_iou, points_of

R = DEFAULTS.maskiou_resolution
FINE = 2048

Objects = list[GTObject]
Peer = tuple[str, Callable[[], Any]]


def rows() -> Iterator[Row]:
    """Boxes and polygons, on the candidate pairs of 100 x 100 and on all 10,000 pairs."""
    for kind, share in (("boxes", 0.0), ("polygons", 1.0)):
        pred, gt = scene(100, share)
        candidates = candidate_pairs(aabbs(pred), aabbs(gt), DEFAULTS.candidate_top_k)
        for which, pairs in ((f"{len(candidates)} candidates", candidates), ("10000 pairs", all_pairs(100))):
            what = f"100 x 100 {kind}, {which}"
            yield from compared(what, pred, gt, pairs, peers=coco_peers(pred, gt, pairs))
        exact: MaskIouMode = "supersample" if share else "analytic"
        what = f"100 x 100 {kind}, {len(candidates)} candidates, {exact}"
        yield from compared(what, pred, gt, candidates, peers=shapely_peers(pred, gt, candidates), mode=exact)


def compared(
    what: str, pred: Objects, gt: Objects, pairs: np.ndarray, *, peers: Iterator[Peer], mode: MaskIouMode = "canvas"
) -> Iterator[Row]:
    """One row for each peer; values are compared on a fine canvas where ours approximates an exact area."""
    ours = seconds(lambda: mask_iou(pred, gt, pairs, resolution=R, mode=mode))
    found = mask_iou(pred, gt, pairs, resolution=FINE if mode == "supersample" else R, mode=mode)
    for peer, call in peers:
        difference = np.abs(np.asarray(call()) - found).max()
        yield Row(what, peer, ours, seconds(call), f"{difference:.2g}")


def coco_peers(pred: Objects, gt: Objects, pairs: np.ndarray) -> Iterator[Peer]:
    """Calls that return the IoU of each pair: pair by pair as one writes it, and as one call for the whole matrix."""
    coco = installed("pycocotools.mask")
    if not coco:
        return
    outlines = [[(points_of(one) * (R / BINS)).ravel().tolist() for one in side] for side in (pred, gt)]

    def one_by_one() -> list[float]:
        return [
            coco.iou(coco.frPyObjects([outlines[0][i]], R, R), coco.frPyObjects([outlines[1][j]], R, R), [0])[0, 0]
            for i, j in pairs
        ]

    def drawn_once() -> Any:
        left, right = (coco.frPyObjects(side, R, R) for side in outlines)
        return coco.iou(left, right, [0] * len(right))[tuple(pairs.T)]

    yield "pycocotools, pair by pair", one_by_one
    yield "pycocotools, whole matrix in one call", drawn_once


def shapely_peers(pred: Objects, gt: Objects, pairs: np.ndarray) -> Iterator[Peer]:
    """Calls that return the IoU of each pair: pair by pair, and with shapely's array functions."""
    shapely = installed("shapely")
    if not shapely:
        return

    def polygons(side: Objects) -> Any:
        return shapely.make_valid([shapely.Polygon(points_of(one)) for one in side])

    def one_by_one() -> list[float]:
        left, right = polygons(pred), polygons(gt)
        return [left[i].intersection(right[j]).area / left[i].union(right[j]).area for i, j in pairs]

    def at_once() -> Any:
        left, right = polygons(pred)[pairs[:, 0]], polygons(gt)[pairs[:, 1]]
        shared = shapely.area(shapely.intersection(left, right))
        return shared / (shapely.area(left) + shapely.area(right) - shared)

    yield "shapely, pair by pair", one_by_one
    yield "shapely, arrays", at_once


TABLE = Table("Mask IoU", "ms", 1e3, rows)
