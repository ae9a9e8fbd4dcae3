"""IoU at several scales: pycocotools' masks made coarser by hand, and what gate and cost make of it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.assign import MatchOptions, match
from stage2_trainer.matching.geometry import iou_of_scales, mask_iou, points_of
from tests.unit.trainer.matching.strategies import box, objects

coco = pytest.importorskip("pycocotools.mask")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools itself


def cells(shape, resolution, side):
    """The cells of a grid that a shape has pixels in: pycocotools draws it, and a loop looks at every cell."""
    flat = [float(value) * resolution / 1000 for value in points_of(shape).ravel()]
    mask = coco.decode(coco.merge(coco.frPyObjects([flat], resolution, resolution)))
    edges = range(0, resolution, side)
    return {(x, y) for y in edges for x in edges if mask[y : y + side, x : x + side].any()}


def overlap(left, right):
    return len(left & right) / len(left | right) if left | right else 0.0


def every_pair(pred, gt):
    return np.array([[i, j] for i in range(len(pred)) for j in range(len(gt))], dtype=np.int64).reshape(-1, 2)


@given(objects, objects, st.sampled_from([(2,), (3, 7), (2, 4, 8, 16)]), st.sampled_from([50, 64, 70]))
@settings(max_examples=60, deadline=None)
def test_it_is_the_mean_over_grids_that_are_laid_by_hand(pred, gt, sides, resolution):
    pairs = every_pair(pred, gt)
    plain = mask_iou(pred, gt, pairs, resolution=resolution)
    expected = [
        np.mean([overlap(cells(pred[i], resolution, side), cells(gt[j], resolution, side)) for side in (1, *sides)])
        for i, j in pairs
    ]
    found = iou_of_scales(pred, gt, pairs, plain, resolution=resolution, sides=sides)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@given(objects, objects)
@settings(max_examples=60, deadline=None)
def test_without_grids_it_is_the_iou_of_the_canvas_itself(pred, gt):
    pairs = every_pair(pred, gt)
    plain = mask_iou(pred, gt, pairs)
    assert iou_of_scales(pred, gt, pairs, plain, resolution=256, sides=()) is plain


def test_a_near_miss_is_matched_and_a_far_one_is_not():
    # Cells of 32 pixels: 125 bins. Beside each other within one cell; and half the image apart.
    true, near, far = box(130, 130, 170, 170), box(175, 130, 215, 170), box(600, 600, 640, 640)
    options = MatchOptions(maskiou_gate=0.2, maskiou_scales=(8, 16, 32))
    assert match([near], [true], MatchOptions(maskiou_gate=0.2)).pairs == ()
    (pair,) = match([far, near], [true], options).pairs
    assert (pair.pred, pair.iou) == (1, 0.0)
    expected = np.mean([overlap(cells(near, 256, side), cells(true, 256, side)) for side in (1, 8, 16, 32)])
    assert pair.cost == pytest.approx(1 - expected)


def test_the_gate_and_the_cost_take_the_mean_and_the_record_keeps_the_canvas():
    pred, true = box(100, 100, 200, 200), box(150, 100, 250, 200)
    (pair,) = match([pred], [true], MatchOptions(maskiou_scales=(64,))).pairs
    coarse = overlap(cells(pred, 256, 64), cells(true, 256, 64))
    assert pair.iou == pytest.approx(0.342105, abs=5e-7)
    assert coarse == 1.0  # one cell holds both
    assert pair.cost == pytest.approx(1 - (pair.iou + coarse) / 2)
    assert match([pred], [true], MatchOptions(maskiou_scales=(64,), maskiou_gate=0.68)).gating_rejections == 1


def test_a_shape_without_a_pixel_has_no_cell_at_any_scale():
    dot = [box(500, 500, 501, 501)]
    assert match(dot, dot, MatchOptions(maskiou_scales=(2, 64))).pairs == ()
