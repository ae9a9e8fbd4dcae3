"""The digits: tight boxes, legible ink, separate splits, the same files from a seed, and a valid COCO file."""

import hashlib
import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from digits.coco import Part, write_part
from digits.ink import NAMES, make_ink, scans_of
from digits.photographs import PHOTOGRAPHS
from digits.scene import LEAST_DIFFERENCE, MOST_DIGITS, MOST_SHARED, Hand, legible, make_scene, shared
from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.record_writer import RecordChoice, write_records
from tests.unit.examples.conftest import contents, written_twice

SEED = 7
PARTS = ("train", "test")


@pytest.fixture(scope="module")
def scenes():
    return [make_scene(SEED, part, index, side=160) for part in PARTS for index in range(40)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    for part in PARTS:
        assert len(list(write_part(folder, Part(part, 6, SEED, side=128)))) == 6
    return folder


def pixels(scene):
    return hashlib.sha256(scene.pixels.tobytes()).hexdigest()


def test_scene_is_determined_by_seed_part_and_index(scenes):
    again = make_scene(SEED, "train", 5, side=160)
    assert (again.digits, pixels(again)) == (scenes[5].digits, pixels(scenes[5]))
    for seed, part, index in ((8, "train", 5), (SEED, "test", 5), (SEED, "train", 6)):
        assert make_scene(seed, part, index, side=160).digits != again.digits


def test_train_and_test_parts_share_no_scans_or_photographs(scenes):
    assert set(scans_of("train")) & set(scans_of("test")) == set()
    assert set(PHOTOGRAPHS["train"]) & set(PHOTOGRAPHS["test"]) == set()
    used = {part: {one.scan for scene in some for one in scene.digits} for part, some in _by_part(scenes)}
    assert all(used[part] <= set(scans_of(part)) for part in PARTS)


def test_hand_limits_digit_classes_and_heights():
    hand = Hand(kinds=3, smallest=0.4, largest=0.6)
    scenes = [make_scene(SEED, "test", index, side=100, most=2, hand=hand) for index in range(30)]
    written = [(scene, one) for scene in scenes for one in scene.digits]
    assert {one.digit for _, one in written} == {0, 1, 2}
    heights = [(one.box[3] - one.box[1]) / min(scene.pixels.shape[:2]) for scene, one in written]
    assert min(heights) > 0.3
    assert 0.5 < max(heights) < 0.85
    assert Part("test", 1, SEED, side=100, most=2, hand=hand).scene(4).digits == scenes[4].digits


def _by_part(scenes):
    return zip(PARTS, (scenes[:40], scenes[40:]), strict=True)


def test_every_digit_and_digit_count_occurs(scenes):
    assert {one.digit for scene in scenes for one in scene.digits} == set(range(10))
    assert {len(scene.digits) for scene in scenes} == set(range(1, MOST_DIGITS + 1))


def test_box_ends_where_ink_ends():
    import random

    for number in range(60):
        coverage = make_ink(random.Random(number), "train", height=10 + number).coverage
        seen = coverage >= 0.5
        assert all(side.any() for side in (seen[0], seen[-1], seen[:, 0], seen[:, -1]))


def test_digit_fills_its_box_within_image(scenes):
    for scene in scenes:
        height, width, _ = scene.pixels.shape
        for one in scene.digits:
            left, top, right, bottom = one.box
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            inside = scene.inked[top:bottom, left:right]
            assert all(side.any() for side in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            assert 0 < one.area <= inside.sum()


def test_boxes_barely_overlap_and_ink_never_does(scenes):
    for scene in scenes:
        boxes = [one.box for one in scene.digits]
        assert all(shared(a, b) <= MOST_SHARED for i, a in enumerate(boxes) for b in boxes[:i])
        # As many pixels are ink as the digits have: none belongs to two of them.
        assert sum(one.area for one in scene.digits) == scene.inked.sum()


def test_overlap_is_relative_to_smaller_box():
    assert shared((0, 0, 10, 10), (5, 5, 15, 15)) == 0.25
    assert shared((0, 0, 10, 10), (2, 2, 4, 4)) == 1
    assert shared((0, 0, 10, 10), (10, 0, 20, 10)) == 0


@pytest.mark.parametrize("brightness", [0.0, 0.5, 1.0])
def test_ink_contrasts_with_background(brightness):
    found = legible(np.full((4, 4), brightness))
    assert found
    for colour in found:
        assert abs(np.dot(colour, (0.299, 0.587, 0.114)) / 255 - brightness) >= LEAST_DIFFERENCE


def test_no_ink_is_legible_on_checkerboard_background():
    assert legible(np.indices((4, 4)).sum(axis=0) % 2 * 1.0) == []


def test_annotations_are_valid_coco(written, capsys):
    coco = COCO(str(written / "test.json"))
    assert [category["name"] for category in coco.loadCats(coco.getCatIds())] == list(NAMES)
    for entry in coco.loadImgs(coco.getImgIds()):
        with Image.open(written / "test" / entry["file_name"]) as image:
            assert image.size == (entry["width"], entry["height"])
    assert len(coco.getAnnIds()) == sum(len(Part("test", 6, SEED, side=128).scene(i).digits) for i in range(6))


def test_coco_import_of_digits_leaves_nothing_out(written, tmp_path):
    tally = Tally()
    images = read_coco(written / "train.json", written / "train", tally)
    write_records(images, tmp_path / "train.jsonl", RecordChoice(), tally)
    annotations = json.loads((written / "train.json").read_text())["annotations"]
    assert (tally.records, tally.objects) == (6, len(annotations))
    assert not tally.images_left_out
    assert not tally.objects_left_out


def test_same_command_writes_same_bytes(tmp_path):
    options = ["--train", "3", "--test", "2", "--size", "96", "--most", "3"]
    folder = written_twice(tmp_path, "make_digits.py", *options)
    assert len(contents(folder)) == 3 + 2 + 2
