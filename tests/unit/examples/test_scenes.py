"""Scenes: shapes that fit, do not overlap, and are reproducible from a seed."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from tiny_model.scenes import KINDS, MAX_SHAPES, Scene, Shape, draw, make_scene

SCENES = [make_scene(7, "train", index) for index in range(200)]


def test_scene_is_determined_by_seed_part_and_index():
    assert make_scene(7, "train", 5) == SCENES[5]


@pytest.mark.parametrize("key", [(8, "train", 5), (7, "held-out", 5), (7, "train", 6)])
def test_different_seed_part_or_index_gives_different_scene(key):
    assert make_scene(*key) != SCENES[5]


def test_scenes_and_pixels_are_same_on_every_machine():
    digest = hashlib.sha256()
    for scene in SCENES:
        digest.update(repr(scene).encode())
        digest.update(draw(scene).tobytes())
    assert digest.hexdigest() == "b37b2277dcdaa9b7c9ffc06f85f74097a7cc3a30dd597e333b27b610bc2427bb"


def test_every_shape_kind_and_count_occurs():
    assert {shape.kind for scene in SCENES for shape in scene.shapes} == set(KINDS)
    assert {len(scene.shapes) for scene in SCENES} == set(range(1, MAX_SHAPES + 1))


def test_boxes_lie_inside_image_without_touching():
    for scene in SCENES:
        covered = np.zeros((scene.size + 1, scene.size + 1), dtype=int)
        for x1, y1, x2, y2 in (shape.box for shape in scene.shapes):
            assert 0 <= x1 < x2 <= scene.size
            assert 0 <= y1 < y2 <= scene.size
            covered[y1 : y2 + 1, x1 : x2 + 1] += 1
        assert covered.max() == 1


def test_shapes_are_ordered_by_top_then_left():
    for scene in SCENES:
        corners = [(shape.box[1], shape.box[0]) for shape in scene.shapes]
        assert corners == sorted(corners)


def test_triangle_touches_its_box_and_starts_at_topmost_corner():
    triangles = [shape for scene in SCENES for shape in scene.shapes if shape.kind == "triangle"]
    for triangle in triangles:
        xs, ys = zip(*triangle.points, strict=True)
        assert (min(xs), min(ys), max(xs), max(ys)) == triangle.box
        assert triangle.points[0] == min(triangle.points, key=lambda point: (point[1], point[0]))


def test_drawn_shape_fills_its_box():
    for scene in SCENES:
        for shape in scene.shapes:
            alone = draw(replace(scene, shapes=(shape,)))
            rows, columns = np.nonzero((alone != scene.background).any(axis=-1))
            x1, y1, x2, y2 = shape.box
            drawn = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            # The tip of a triangle is thinner than a pixel, and a pixel is drawn by its centre.
            slack = 3 if shape.kind == "triangle" else 0
            assert np.abs(np.subtract(drawn, (x1, y1, x2, y2))).max() <= slack


def test_drawn_areas_match_geometry():
    shapes = {
        "box": Shape("red", "box", (215, 45, 45), (8, 16, 48, 56)),
        "ellipse": Shape("red", "ellipse", (215, 45, 45), (8, 16, 48, 56)),
        "triangle": Shape("red", "triangle", (215, 45, 45), (8, 16, 48, 56), ((8, 16), (48, 16), (8, 56))),
    }
    white = (255, 255, 255)
    area = {kind: (draw(Scene(64, white, (shape,))) != white).any(-1).sum() for kind, shape in shapes.items()}
    assert area["box"] == 1600
    assert area["ellipse"] == pytest.approx(1600 * np.pi / 4, rel=0.02)
    assert area["triangle"] == pytest.approx(800, rel=0.03)


def test_bins_are_thousandths_of_side_capped_at_999():
    shape = Shape("red", "box", (215, 45, 45), (0, 12, 48, 96))
    assert Scene(96, (255, 255, 255), (shape,)).objects() == [("red box", "bbox_2d", [0, 125, 500, 999])]
