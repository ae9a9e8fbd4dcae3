"""Overlaps of predicted and true objects, in bins. Source: semantics, section 4.4.

Masks are COCO's: pycocotools draws outlines as run lengths, and compares these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
from pycocotools import mask as rle

from stage2_api.coordinates import BINS, MAX_BIN
from stage2_api.rollout_matching import MaskIouMode
from stage2_trainer.matching.parse import Kind
from stage2_trainer.matching.tokens import BoolArray, FloatArray, IntArray

Masks = list[dict[str, Any]]


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
    sizes = np.array([len(shape.bins) for shape in shapes])
    flat = np.fromiter(chain.from_iterable(shape.bins for shape in shapes), dtype=np.int64, count=int(sizes.sum()))
    points = np.clip(flat, 0, MAX_BIN).reshape(-1, 2)
    starts = (np.cumsum(sizes) - sizes) // 2
    return np.concatenate([np.minimum.reduceat(points, starts), np.maximum.reduceat(points, starts)], axis=1)


def points_of(shape: Shape) -> IntArray:
    """Return the vertices (N, 2) of a shape, clamped to 0..999; a box has its corners, clockwise from the top left."""
    bins = np.clip(np.array(shape.bins, dtype=np.int64), 0, MAX_BIN)
    if shape.kind != "bbox":
        return bins.reshape(-1, 2)
    (x0, x1), (y0, y1) = np.sort(bins[::2]), np.sort(bins[1::2])
    return np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])


def box_iou(left: IntArray, right: IntArray) -> FloatArray:
    """Return continuous IoU of boxes [x0, y0, x1, y1], broadcast over all axes but the last; 0 for an empty union."""
    intersection = _overlap(left, right)
    union = _area(left) + _area(right) - intersection
    ratio: FloatArray = np.divide(intersection, union, out=np.zeros(np.shape(union)), where=union > 0)
    return ratio


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


def mask_iou(
    pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, *, resolution: int = 256, mode: MaskIouMode = "canvas"
) -> FloatArray:
    """Return mask IoU of the given pairs.

    pairs: (K, 2) indices into `pred` and `gt`. Returns (K,) in 0..1; 0 where the union is empty, for fewer than three
    points, and for `resolution` <= 0. The modes are those of the key `maskiou_mode`.
    """
    if resolution <= 0 or len(pairs) == 0:
        return np.zeros(len(pairs))
    left, right = aabbs(pred)[pairs[:, 0]], aabbs(gt)[pairs[:, 1]]
    if mode == "canvas":
        result = box_iou(_filled_pixels(left, resolution), _filled_pixels(right, resolution))
    else:  # a box without area equals only itself
        result = np.where((left == right).all(axis=-1), 1.0, box_iou(left, right))
    outlined = ~(_is_box(pred)[pairs[:, 0]] & _is_box(gt)[pairs[:, 1]])
    result[outlined] = 0
    # masks stay inside bounding boxes, so only pairs with overlapping boxes need drawing
    drawn = outlined & (_overlap(left, right) > 0)
    if drawn.any() and mode == "supersample":
        result[drawn] = _stretched_iou(pred, gt, pairs[drawn], resolution)
    elif drawn.any():
        result[drawn] = _iou_of_masks(_draw(pred, resolution), _draw(gt, resolution), pairs[drawn])
    return result


def _filled_pixels(boxes: IntArray, resolution: int) -> IntArray:
    """Return the pixels [x0, y0, x1, y1) that COCO's mask of a box fills: it rounds to fifths of a pixel first."""
    fifths = (5 * (boxes * np.float64(resolution / BINS)) + 0.5).astype(np.int64)
    pixels: IntArray = (fifths + 2) // 5
    return pixels


def _is_box(shapes: Sequence[Shape]) -> BoolArray:
    return np.array([shape.kind == "bbox" for shape in shapes], dtype=np.bool_)


def _draw(shapes: Sequence[Shape], resolution: int) -> Masks:
    """Return the masks of shapes on a canvas over the whole image."""
    return _rasterize([points_of(shape) * np.float64(resolution / BINS) for shape in shapes], resolution)


def _stretched_iou(pred: Sequence[Shape], gt: Sequence[Shape], pairs: IntArray, resolution: int) -> list[float]:
    """Return mask IoU of each pair on a canvas that is stretched over the two."""
    left, right = aabbs(pred)[pairs[:, 0]], aabbs(gt)[pairs[:, 1]]
    low = np.minimum(left, right)[:, :2]
    scale = resolution / np.maximum(np.maximum(left, right)[:, 2:] - low, 1)
    masks = []
    for shapes, chosen in zip((pred, gt), pairs.T, strict=True):
        points = [points_of(shape) for shape in shapes]
        masks.append(_rasterize([(points[i] - low[k]) * scale[k] for k, i in enumerate(chosen)], resolution))
    return [float(rle.iou([one], [other], [0])[0, 0]) for one, other in zip(*masks, strict=True)]


def _rasterize(outlines: Sequence[FloatArray], resolution: int) -> Masks:
    """Return the masks of outlines (N, 2) in pixels."""
    # pycocotools takes four numbers for a box, so the last point of a line is repeated
    flat = [(one if len(one) > 2 else one[[0, -1, -1]]).ravel().tolist() for one in outlines]
    masks: Masks = rle.frPyObjects(flat, resolution, resolution)
    return masks


def _iou_of_masks(left: Masks, right: Masks, pairs: IntArray) -> FloatArray:
    iou: FloatArray = rle.iou(left, right, [0] * len(right))[tuple(pairs.T)]
    return iou
