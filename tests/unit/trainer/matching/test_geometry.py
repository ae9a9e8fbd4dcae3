"""Mask IoU: published values, and boxes that are compared without drawing them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.geometry import aabbs, box_iou, mask_iou
from tests.unit.trainer.matching.shapes import box, poly

PAIR = np.array([[0, 0]])


def iou(left, right, **options):
    return mask_iou([left], [right], PAIR, **options)[0]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (box(100, 100, 200, 200), box(150, 100, 250, 200), 0.342105),
        (box(100, 100, 200, 200), box(110, 110, 210, 210), 0.685233),
        (box(0, 0, 999, 999), box(0, 0, 999, 500), 0.5),
        (poly(100, 100, 300, 100, 200, 300), box(100, 100, 300, 300), 0.490196),
    ],
)
def test_published_values_come_out(left, right, expected):
    assert iou(left, right) == pytest.approx(expected, abs=5e-7)
    assert iou(right, left) == iou(left, right)


def test_boxes_under_a_pixel_never_match_on_the_canvas_and_always_do_otherwise():
    for small in (box(500, 500, 501, 501), box(500, 500, 500, 600)):
        assert iou(small, small) == 0
        assert iou(small, small, mode="analytic") == 1
        assert iou(small, small, mode="supersample") == 1


def test_small_polygons_are_seen_by_the_stretched_canvas_only():
    small = poly(500, 500, 502, 500, 500, 502)
    assert iou(small, small) == 0
    assert iou(small, small, mode="supersample") == 1
    assert iou(small, box(500, 500, 502, 502), mode="supersample") == pytest.approx(0.5, abs=0.01)


def test_analytic_boxes_have_continuous_overlap():
    assert iou(box(100, 100, 200, 200), box(150, 100, 250, 200), mode="analytic") == pytest.approx(1 / 3)


def test_corners_may_come_in_any_order():
    assert iou(box(200, 200, 100, 100), box(250, 200, 150, 100)) == pytest.approx(0.342105, abs=5e-7)


def test_no_resolution_no_overlap():
    assert iou(box(0, 0, 9, 9), box(0, 0, 9, 9), resolution=0) == 0
    assert iou(box(0, 0, 999, 999), box(0, 0, 999, 999), resolution=-1) == 0


def test_two_points_have_no_area():
    assert iou(poly(0, 0, 900, 900), box(0, 0, 999, 999)) == 0


def test_no_pairs_no_values():
    assert mask_iou([], [], np.zeros((0, 2), dtype=int)).shape == (0,)


@given(st.lists(st.lists(st.integers(0, 999), min_size=4, max_size=4), min_size=1, max_size=6))
@settings(max_examples=100, deadline=None)
def test_boxes_have_the_same_overlap_as_polygons_and_without_drawing(corners):
    boxes = [box(*one) for one in corners]
    quads = []
    for x0, y0, x1, y1 in aabbs(boxes).tolist():
        quads.append(poly(x0, y0, x1, y0, x1, y1, x0, y1))
    pairs = np.array([[i, j] for i in range(len(boxes)) for j in range(len(boxes))])
    np.testing.assert_array_equal(mask_iou(boxes, boxes, pairs), mask_iou(quads, quads, pairs))


def test_large_canvases_have_the_same_overlaps():
    shapes = [poly(100, 100, 300, 100, 200, 300), box(100, 100, 300, 300)]
    pairs = np.array([[0, 1], [0, 0], [1, 0]])
    assert mask_iou(shapes, shapes, pairs, resolution=4096) == pytest.approx([0.5, 1.0, 0.5], abs=2e-3)


def test_box_iou_of_boxes_without_area_is_zero():
    empty = np.array([5, 5, 5, 5])
    assert box_iou(empty, empty) == 0
