"""Overlap of predicted and true objects in norm1000 space. Source: semantics, section 4.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from stage2_trainer.matching.options import MaskIouMode
from stage2_trainer.matching.parse import Kind
from stage2_trainer.matching.raster import FloatArray, box_cells, popcount, rasterize, shared_pixels
from stage2_trainer.matching.tokens import BINS, MAX_BIN, IntArray

_CHUNK_BYTES = 2**26


class Shape(Protocol):
    """Anything with a kind and bins: `ParsedObject`, `GTObject`."""

    @property
    def kind(self) -> Kind | None: ...

    @property
    def bins(self) -> tuple[int, ...]: ...


def aabbs(shapes: Sequence[Shape]) -> IntArray:
    """Axis-aligned bounding boxes [x0, y0, x1, y1] (N, 4) in bins, corners ordered, clamped to 0..999."""
    if not shapes:
        return np.zeros((0, 4), dtype=np.int64)
    sizes = np.fromiter((len(shape.bins) for shape in shapes), dtype=np.int64, count=len(shapes))
    points = np.concatenate([np.asarray(shape.bins, dtype=np.int64) for shape in shapes]).reshape(-1, 2)
    starts = (np.cumsum(sizes) - sizes) // 2
    low, high = np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)
    boxes: IntArray = np.clip(np.concatenate([low, high], axis=1), 0, MAX_BIN)
    return boxes


def box_iou(left: IntArray, right: IntArray) -> FloatArray:
    """Continuous IoU of boxes, broadcast over all axes but the last, [x0, y0, x1, y1]; 0 where the union is empty."""
    intersection = _overlap(left, right)
    union = _area(left) + _area(right) - intersection
    return _ratio(intersection, union)


def points_of(shape: Shape) -> IntArray:
    """Vertices (N, 2) in bins, clamped to 0..999; a box gives its corners clockwise from the least x and y."""
    bins: IntArray = np.minimum(np.maximum(np.array(shape.bins, dtype=np.int64), 0), MAX_BIN)
    if shape.kind != "bbox":
        return bins.reshape(-1, 2)
    (x0, x1), (y0, y1) = np.sort(bins[0::2]), np.sort(bins[1::2])
    return np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])


def mask_iou(
    pred: Sequence[Shape],
    gt: Sequence[Shape],
    pairs: IntArray,
    *,
    resolution: int = 256,
    mode: MaskIouMode = "canvas",
) -> FloatArray:
    """Mask IoU of the given pairs.

    pairs: (K, 2) indices into `pred` and `gt`. Returns (K,) in 0..1; 0 where the union is empty, for fewer than three
    points, and for `resolution` <= 0. The modes are those of `MatchOptions.maskiou_mode`.
    """
    result = np.zeros(len(pairs))
    if resolution <= 0 or len(pairs) == 0:
        return result
    left, right = aabbs(pred)[pairs[:, 0]], aabbs(gt)[pairs[:, 1]]
    both_boxes = _is_box(pred)[pairs[:, 0]] & _is_box(gt)[pairs[:, 1]]
    of_boxes = _canvas_boxes if mode == "canvas" else _exact_boxes
    result[both_boxes] = of_boxes(left[both_boxes], right[both_boxes], resolution)
    # A mask never leaves its bounding box, so only boxes that overlap are worth drawing.
    drawn = ~both_boxes & (_overlap(left, right) > 0)
    of_others = _stretched if mode == "supersample" else _canvas
    result[drawn] = of_others(pred, gt, pairs[drawn], resolution)
    return result


def _is_box(shapes: Sequence[Shape]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.fromiter((shape.kind == "bbox" for shape in shapes), dtype=np.bool_, count=len(shapes))


def _overlap(left: IntArray, right: IntArray) -> IntArray:
    """Area of the intersection of boxes."""
    sides = np.minimum(left[..., 2:], right[..., 2:]) - np.maximum(left[..., :2], right[..., :2])
    sides = np.maximum(sides, 0)
    area: IntArray = sides[..., 0] * sides[..., 1]
    return area


def _area(boxes: IntArray) -> IntArray:
    area: IntArray = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return area


def _ratio(intersection: IntArray, union: IntArray) -> FloatArray:
    return np.divide(intersection, union, out=np.zeros(np.shape(union)), where=union > 0)


def _canvas_boxes(left: IntArray, right: IntArray, resolution: int) -> FloatArray:
    """A box fills a rectangle of cells, so its mask need not be drawn."""
    scale = np.float64(resolution / BINS)
    return box_iou(box_cells(left * scale), box_cells(right * scale))


def _exact_boxes(left: IntArray, right: IntArray, _: int) -> FloatArray:
    """Continuous IoU; boxes without area count as equal only to themselves."""
    return np.where((left == right).all(axis=-1), 1.0, box_iou(left, right))


def _canvas(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int) -> FloatArray:
    """Mask IoU on one canvas over the whole image; each shape is drawn once a chunk."""
    parts = [np.zeros(0)]
    for chunk in _chunks(pairs, resolution):
        (left, i), (right, j) = (np.unique(chunk[:, side], return_inverse=True) for side in (0, 1))
        drawn = [
            rasterize([points_of(side[k]) * np.float64(resolution / BINS) for k in used], resolution)
            for side, used in ((pred, left), (gt, right))
        ]
        intersection = shared_pixels(drawn[0], drawn[1], np.stack([i, j], axis=1))
        parts.append(_ratio(intersection, popcount(drawn[0])[i] + popcount(drawn[1])[j] - intersection))
    return np.concatenate(parts)


def _stretched(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int) -> FloatArray:
    """Mask IoU of each pair on a canvas stretched over the two together."""
    parts = [np.zeros(0)]
    for chunk in _chunks(pairs, resolution):
        couples = [_stretch(points_of(pred[i]), points_of(gt[j]), resolution) for i, j in chunk]
        left = rasterize([a for a, _ in couples], resolution)
        right = rasterize([b for _, b in couples], resolution)
        each = np.arange(len(chunk))
        intersection = shared_pixels(left, right, np.stack([each, each], axis=1))
        parts.append(_ratio(intersection, popcount(left) + popcount(right) - intersection))
    return np.concatenate(parts)


def _stretch(left: IntArray, right: IntArray, resolution: int) -> tuple[FloatArray, FloatArray]:
    both = np.concatenate([left, right])
    low = both.min(axis=0)
    scale = resolution / np.maximum(both.max(axis=0) - low, 1)
    return (left - low) * scale, (right - low) * scale


def _chunks(pairs: IntArray, resolution: int) -> list[IntArray]:
    """Pairs in portions whose masks never take more than some tens of megabytes."""
    mask_bytes = resolution * -(-resolution // 64) * 8
    size = max(1, _CHUNK_BYTES // (2 * mask_bytes))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]
