"""Mask IoU beyond the golden vectors: odd shapes, and boxes that are compared without drawing them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.geometry import aabbs, box_iou, mask_iou
from tests.unit.trainer.matching.strategies import box, poly

PAIR = np.array([[0, 0]])


def iou(left, right, **options):
    return mask_iou([left], [right], PAIR, **options)[0]


def test_polygon_of_two_points_has_no_overlap():
    assert iou(poly(0, 0, 900, 900), box(0, 0, 999, 999)) == 0


def test_mask_iou_of_no_pairs_is_empty():
    assert mask_iou([], [], np.zeros((0, 2), dtype=int)).shape == (0,)


@given(st.lists(st.lists(st.integers(0, 999), min_size=4, max_size=4), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_mask_iou_of_boxes_equals_mask_iou_of_same_polygons(corners):
    boxes = [box(*one) for one in corners]
    quads = []
    for x0, y0, x1, y1 in aabbs(boxes).tolist():
        quads.append(poly(x0, y0, x1, y0, x1, y1, x0, y1))
    pairs = np.array([[i, j] for i in range(len(boxes)) for j in range(len(boxes))])
    np.testing.assert_array_equal(mask_iou(boxes, boxes, pairs), mask_iou(quads, quads, pairs))


def test_mask_iou_is_correct_on_large_canvas():
    shapes = [poly(100, 100, 300, 100, 200, 300), box(100, 100, 300, 300)]
    pairs = np.array([[0, 1], [0, 0], [1, 0]])
    assert mask_iou(shapes, shapes, pairs, resolution=4096) == pytest.approx([0.5, 1.0, 0.5], abs=2e-3)


@pytest.mark.parametrize("resolution", [32, 256])
def test_supersampled_mask_iou_covers_both_outlines_in_either_order(resolution):
    small, large = poly(100, 100, 200, 100, 200, 200, 100, 200), poly(100, 100, 300, 100, 300, 300, 100, 300)
    for pair in ((small, large), (large, small)):
        assert iou(*pair, resolution=resolution, mode="supersample") == pytest.approx(0.25, abs=2 / resolution)


def test_box_iou_of_boxes_without_area_is_zero():
    empty = np.array([5, 5, 5, 5])
    assert box_iou(empty, empty) == 0
