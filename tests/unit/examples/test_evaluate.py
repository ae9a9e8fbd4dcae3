"""Held-out figures from known answers, and the model card that shows them."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from stage2_trainer.matching.ground_truth import GTObject
from tiny_model.answers import Answer, truth, write
from tiny_model.card import HeldOut, Making, write_card
from tiny_model.evaluate import box_ious, measure
from tiny_model.scenes import make_scene
from tiny_model.warm_up import Recipe

SCENES = [make_scene(7, "held-out", index) for index in range(10)]
ANSWERS = [Answer(write(scene), tuple(truth(scene)), True) for scene in SCENES]
QUALITY = replace(measure(ANSWERS, [truth(scene) for scene in SCENES]), recall_at_50=0.457)
MAKING = Making("python make it", seed=7, minutes=7.5, parameters=1_631_616, vocabulary=1355, recipe=Recipe())


def test_model_card_reports_quality_and_recipe(tmp_path):
    write_card(tmp_path, MAKING, HeldOut(SCENES, {"float32": QUALITY}, ANSWERS))
    text = (tmp_path / "README.md").read_text()
    assert "| recall at IoU 0.5 | 0.46 |" in text
    assert "python make it" in text
    assert f"- steps: {MAKING.recipe.steps}" in text
    assert write(SCENES[0]) in text
    assert json.loads((tmp_path / "metrics.json").read_text())["held_out"]["float32"]["recall_at_50"] == 0.457


def test_model_card_picture_is_small(tmp_path):
    write_card(tmp_path, MAKING, HeldOut(SCENES, {"float32": QUALITY}, ANSWERS))
    picture = tmp_path / "held-out.png"
    assert picture.stat().st_size < 150_000
    with Image.open(picture) as image:
        assert image.width < 1100


BOX = GTObject("red box", "bbox", (100, 100, 200, 200))
SHIFTED = GTObject("red box", "bbox", (150, 100, 250, 200))
TRIANGLE = GTObject("blue triangle", "poly", (500, 500, 700, 500, 600, 700))


def _answer(*objects: GTObject, well_formed: bool = True) -> Answer:
    return Answer("", objects, well_formed)


def test_perfect_answers_score_one():
    quality = measure([_answer(BOX, TRIANGLE)], [[BOX, TRIANGLE]])
    assert (quality.parse_rate, quality.recall_at_50, quality.precision_at_50, quality.mean_iou) == (1, 1, 1, 1)
    assert quality.desc_exact == 1


def test_iou_is_computed_from_bounding_boxes():
    around = GTObject("x", "bbox", (500, 500, 700, 700))
    assert box_ious([BOX, TRIANGLE], [SHIFTED, around]).ravel().tolist() == pytest.approx([1 / 3, 0, 0, 1])


def test_box_without_area_has_zero_iou():
    flat = GTObject("x", "bbox", (1, 1, 1, 9))
    assert box_ious([flat], [flat]).item() == 0


def test_pair_between_thresholds_counts_only_for_lower_one():
    quality = measure([_answer(SHIFTED)], [[BOX]])
    assert (quality.recall_at_30, quality.recall_at_50) == (1, 0)
    assert quality.mean_iou == pytest.approx(1 / 3)


def test_malformed_answer_counts_with_its_readable_objects():
    quality = measure([_answer(well_formed=False), _answer(BOX, well_formed=False)], [[BOX], [BOX]])
    assert (quality.parse_rate, quality.recall_at_50, quality.precision_at_50) == (0, 0.5, 1)


def test_invented_object_lowers_precision_and_wrong_name_lowers_desc_exact():
    renamed = GTObject("blue box", "bbox", BOX.bins)
    quality = measure([_answer(renamed, TRIANGLE)], [[BOX]])
    assert (quality.precision_at_50, quality.recall_at_50, quality.desc_exact) == (0.5, 1, 0)


def test_objects_are_paired_for_largest_total_iou_regardless_of_order():
    assert measure([_answer(TRIANGLE, BOX)], [[BOX, TRIANGLE]]).mean_iou == 1


def test_answer_without_objects_scores_zero():
    quality = measure([_answer()], [[BOX]])
    assert (quality.parse_rate, quality.recall_at_30, quality.precision_at_30, quality.mean_iou) == (1, 0, 0, 0)
