"""Overlaps of predicted and true objects, in bins. Source: semantics, section 4.4."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from stage2_api.coordinates import BINS, MAX_BIN
from stage2_trainer.matching.options import MaskIouMode
from stage2_trainer.matching.parse import Kind
from stage2_trainer.matching.raster import FloatArray, Masks, box_cells, coarser, rasterize, shared_pixels
from stage2_trainer.matching.tokens import IntArray

_CHUNK_BYTES = 2**26


class Shape(Protocol):
    """An object with a kind and bins, such as `ParsedObject` and `GTObject`."""

    @property
    def kind(self) -> Kind | None: ...

    @property
    def bins(self) -> tuple[int, ...]: ...


def aabbs(shapes: Sequence[Shape]) -> IntArray:
    """Return the axis-aligned bounding boxes [x0, y0, x1, y1] (N, 4) in bins, corners ordered, clamped to 0..999."""
    if not shapes:
        return np.zeros((0, 4), dtype=np.int64)
    # two corners bound a box as well as four do
    points, sizes = _points([shape.bins for shape in shapes])
    starts = np.cumsum(sizes) - sizes
    return np.concatenate([np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)], axis=1)


def box_iou(left: IntArray, right: IntArray) -> FloatArray:
    """Return continuous IoU of boxes [x0, y0, x1, y1], broadcast over all axes but the last; 0 for an empty union."""
    intersection = _overlap(left, right)
    union = _area(left) + _area(right) - intersection
    return _ratio(intersection, union)


def outlines(shapes: Sequence[Shape]) -> tuple[IntArray, IntArray]:
    """Return the vertices (T, 2) of all shapes in turn, in bins clamped to 0..999, and the number of each (N,).

    A box has its corners, clockwise from the least x and y.
    """
    return _points([_corners(shape.bins) if shape.kind == "bbox" else shape.bins for shape in shapes])


def _points(values: Sequence[tuple[int, ...]]) -> tuple[IntArray, IntArray]:
    """Return the points (T, 2), clamped to 0..999, of sequences of x and y in turn, and the number of each (N,)."""
    sizes = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    flat = np.fromiter(chain.from_iterable(values), dtype=np.int64, count=int(sizes.sum()))
    return np.clip(flat, 0, MAX_BIN).reshape(-1, 2), sizes // 2


def points_of(shape: Shape) -> IntArray:
    """Return the vertices (N, 2) of one shape, as in `outlines`."""
    return outlines([shape])[0]


def mask_iou(
    pred: Sequence[Shape],
    gt: Sequence[Shape],
    pairs: IntArray,
    *,
    resolution: int = 256,
    mode: MaskIouMode = "canvas",
) -> FloatArray:
    """Return mask IoU of the given pairs.

    pairs: (K, 2) indices into `pred` and `gt`. Returns (K,) in 0..1; 0 where the union is empty, for fewer than three
    points, and for `resolution` <= 0. The modes are those of `MatchOptions.maskiou_mode`.
    """
    result = np.zeros(len(pairs))
    if resolution <= 0 or len(pairs) == 0:
        return result
    left, right = aabbs(pred)[pairs[:, 0]], aabbs(gt)[pairs[:, 1]]
    both_boxes = _is_box(pred)[pairs[:, 0]] & _is_box(gt)[pairs[:, 1]]
    box_overlap = _canvas_boxes if mode == "canvas" else _exact_boxes
    result[both_boxes] = box_overlap(left[both_boxes], right[both_boxes], resolution)
    # masks stay inside bounding boxes, so only pairs with overlapping boxes need drawing
    drawn = ~both_boxes & (_overlap(left, right) > 0)
    mask_overlap = _stretched if mode == "supersample" else _canvas
    result[drawn] = mask_overlap(pred, gt, pairs[drawn], resolution)
    return result


def iou_of_scales(
    pred: Sequence[Shape],
    gt: Sequence[Shape],
    pairs: IntArray,
    iou: FloatArray,
    *,
    resolution: int,
    sides: Sequence[int],
) -> FloatArray:
    """Return the mean of the pairs' IoU on the canvas (`iou`, (K,)) and on coarser grids, (K,); `iou` without grids.

    sides: of the grids' cells in pixels. A cell belongs to a shape that has any of its pixels: this is Multiscale IoU
    (arXiv 2105.14572) with the plain mean over scales. Plain IoU is 0 for every miss; this one grows the nearer a miss
    is. A shape without a pixel has 0 at all scales.
    """
    if not sides or resolution <= 0:
        return iou
    return np.asarray(np.mean([iou, *(_grid_iou(pred, gt, pairs, resolution, side) for side in sides)], axis=0))


def _grid_iou(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int, side: int) -> FloatArray:
    """Return IoU of the grid cells in which the two shapes of each pair have pixels, (K,)."""
    result = np.zeros(len(pairs))
    boxes = _is_box(pred)[pairs[:, 0]] & _is_box(gt)[pairs[:, 1]]
    left, right = aabbs(pred)[pairs[boxes, 0]], aabbs(gt)[pairs[boxes, 1]]
    scale = np.float64(resolution / BINS)
    result[boxes] = box_iou(_cells_of(box_cells(left * scale), side), _cells_of(box_cells(right * scale), side))
    result[~boxes] = _canvas(pred, gt, pairs[~boxes], resolution, side)
    return result


def _cells_of(pixels: IntArray, side: int) -> IntArray:
    """Return the cells [x0, y0, x1, y1) that rectangles of pixels (N, 4) touch; empty without a pixel."""
    cells = np.concatenate([pixels[:, :2] // side, -(-pixels[:, 2:] // side)], axis=1)
    cells[_area(pixels) == 0] = 0
    return cells


def _is_box(shapes: Sequence[Shape]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.fromiter((shape.kind == "bbox" for shape in shapes), dtype=np.bool_, count=len(shapes))


def _overlap(left: IntArray, right: IntArray) -> IntArray:
    """Return the area of the intersection of boxes."""
    # one coordinate at a time, so that inner loops run over many boxes and not over two numbers
    width = np.minimum(left[..., 2], right[..., 2]) - np.maximum(left[..., 0], right[..., 0])
    height = np.minimum(left[..., 3], right[..., 3]) - np.maximum(left[..., 1], right[..., 1])
    area: IntArray = np.maximum(width, 0) * np.maximum(height, 0)
    return area


def _area(boxes: IntArray) -> IntArray:
    area: IntArray = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    return area


def _ratio(intersection: IntArray, union: IntArray) -> FloatArray:
    return np.divide(intersection, union, out=np.zeros(np.shape(union)), where=union > 0)


def _canvas_boxes(left: IntArray, right: IntArray, resolution: int) -> FloatArray:
    """Return mask IoU of boxes on the canvas, without drawing: a box fills a rectangle of cells."""
    scale = np.float64(resolution / BINS)
    return box_iou(box_cells(left * scale), box_cells(right * scale))


def _exact_boxes(left: IntArray, right: IntArray, _: int) -> FloatArray:
    """Return continuous IoU; a box without area equals only itself."""
    return np.where((left == right).all(axis=-1), 1.0, box_iou(left, right))


def _canvas(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int, side: int = 1) -> FloatArray:
    """Return mask IoU on one canvas over the whole image; each shape is drawn once per chunk.

    side: of the compared cells, in pixels.
    """
    parts = [np.zeros(0)]
    for chunk in _chunks(pairs, resolution):
        (left, i), (right, j) = (np.unique(chunk[:, side], return_inverse=True) for side in (0, 1))
        drawn_pred = coarser(_draw([pred[k] for k in left], resolution), side)
        drawn_gt = coarser(_draw([gt[k] for k in right], resolution), side)
        shared = shared_pixels(drawn_pred, drawn_gt, np.stack([i, j], axis=1))
        parts.append(_ratio(shared, drawn_pred.areas[i] + drawn_gt.areas[j] - shared))
    return np.concatenate(parts)


def _stretched(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int) -> FloatArray:
    """Return mask IoU of each pair on a canvas that is stretched over both shapes."""
    parts = [np.zeros(0)]
    for chunk in _chunks(pairs, resolution):
        left, right = [pred[i] for i in chunk[:, 0]], [gt[j] for j in chunk[:, 1]]
        boxes = np.stack([aabbs(left), aabbs(right)])
        low = boxes[:, :, :2].min(axis=0)
        scale = resolution / np.maximum(boxes[:, :, 2:].max(axis=0) - low, 1)
        drawn_pred, drawn_gt = _draw(left, resolution, low, scale), _draw(right, resolution, low, scale)
        shared = shared_pixels(drawn_pred, drawn_gt, np.repeat(np.arange(len(chunk))[:, None], 2, axis=1))
        parts.append(_ratio(shared, drawn_pred.areas + drawn_gt.areas - shared))
    return np.concatenate(parts)


def _draw(
    shapes: Sequence[Shape], resolution: int, low: IntArray | None = None, scale: FloatArray | None = None
) -> Masks:
    """Return the masks of shapes on the whole image, or each moved by its `low` and scaled by `scale` (N, 2)."""
    points, sizes = outlines(shapes)
    if low is None or scale is None:
        return rasterize(points * np.float64(resolution / BINS), sizes, resolution)
    moved = points.astype(np.float64) - np.repeat(low, sizes, axis=0)
    moved *= np.repeat(scale, sizes, axis=0)
    return rasterize(moved, sizes, resolution)


def _corners(bins: tuple[int, ...]) -> tuple[int, ...]:
    x0, y0, x1, y1 = bins
    x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
    return x0, y0, x1, y0, x1, y1, x0, y1


def _chunks(pairs: IntArray, resolution: int) -> list[IntArray]:
    """Split the pairs into chunks whose masks take at most some tens of megabytes."""
    mask_bytes = resolution * -(-resolution // 64) * 8
    size = max(1, _CHUNK_BYTES // (2 * mask_bytes))
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]
