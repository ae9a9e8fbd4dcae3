"""Edges of what imports take, count and leave out, on either side."""

import shutil

import numpy as np
import pytest
from pycocotools import mask as reference

from stage2_trainer.prepare import annotations, record_writer, voc
from stage2_trainer.prepare.annotations import NAMED, Tally, stated_size
from tests.unit.trainer.prepare.odd_sets import import_voc, import_yolo, picture, voc_object, yolo
from tests.unit.trainer.prepare.odd_sets import voc as written
from tests.unit.trainer.prepare.test_coco import DataSet, annotation, bins
from tests.unit.trainer.prepare.test_exif import STORED, imported, marked

LINE = "0 0.5 0.25 0.2 0.1"


def test_tally_counts_every_case_and_names_first_few():
    tally = Tally()
    for number in range(NAMED + 2):
        tally.leave_out_object("a reason", f"object {number}")
    assert tally.objects_left_out == {"a reason": NAMED + 2}
    assert tally.names == {"a reason": [f"object {number}" for number in range(NAMED)]}


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [("640", 480.0, (640, 480)), ("nan", 480, None), (640, "inf", None), (640, None, None), ("a", 480, None)],
)
def test_size_is_two_finite_numbers_or_none(width, height, size):
    assert stated_size(width, height) == size


def test_keypoints_of_left_out_object_are_not_counted(tmp_path):
    points = {"keypoints": [1, 2, 2]}
    data = DataSet(tmp_path, [annotation(1, **points), annotation(2, **{**points, "iscrowd": 1})])
    assert len(data.records()[0]["objects"]) == 1
    assert data.tally.changed[annotations.KEYPOINTS] == 1


def test_file_name_takes_precedence_over_coco_url(tmp_path):
    data = DataSet(tmp_path, [annotation(1)], coco_url="http://images.example/train/other.png")
    (record,) = data.records()
    assert record["images"] == ["../images/1.png"]


@pytest.mark.parametrize(("corner", "noted"), [((0, 1), 1), ((1, 0), 1), ((1, 1), 0), ((0.5, 0.5), 1)])
def test_voc_coordinate_below_one_is_noted_for_x_and_y(tmp_path, corner, noted):
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": voc_object(box=(*corner, 50, 100))}))
    assert found.counts.get(voc.FROM_ZERO, 0) == noted
    assert len(found.objects) == 1
    assert np.all(np.array(found.objects[0][1]) >= 0)


@pytest.mark.parametrize("size", [(0, 200), (100, 0), (0, 0)])
def test_zero_width_or_height_counts_as_unknown_size(tmp_path, size):
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": voc_object()}, size=size))
    assert (len(found.records), found.counts) == (1, {})


def test_image_listed_twice_in_split_is_imported_once(tmp_path):
    source = written(tmp_path / "voc", {"a": voc_object()})
    lists = source / voc.SPLITS
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a 1\na -1\na\n")
    assert len(import_voc(tmp_path, source, voc.VocChoice(split="train")).records) == 1


def test_first_image_by_name_with_stem_of_annotation_is_used(tmp_path):
    source = written(tmp_path / "voc", {"a": voc_object()}, file_name="lost.jpg")
    picture(source / "JPEGImages" / "a.png")
    assert import_voc(tmp_path, source).records[0]["images"] == ["../voc/JPEGImages/a.jpg"]


def test_labels_folder_replaces_last_images_folder_in_path(tmp_path):
    data = yolo(tmp_path / "images" / "set", {"a.png": LINE})
    assert len(import_yolo(tmp_path, data).objects) == 1


def test_line_without_keypoints_in_pose_dataset_is_not_counted(tmp_path):
    found = import_yolo(tmp_path, yolo(tmp_path, {"a.png": LINE}, kpt_shape=[2, 3]))
    assert (len(found.objects), found.counts) == (1, {})


@pytest.mark.parametrize(
    ("line", "sample_id"),
    [("../images/train/a.png", "images/train/a"), ("images/train/a.png", "images/train/a"), ("b.png", "lists/b")],
)
def test_image_list_paths_are_relative_to_dataset_or_to_list(tmp_path, line, sample_id):
    data = yolo(tmp_path / "set", {"a.png": LINE}, train="lists/train.txt")
    lists = data.parent / "lists"
    picture(lists / "b.png")
    (lists / "b.txt").write_text(LINE)
    shutil.copytree(data.parent / "images", lists / "images")
    (lists / "train.txt").write_text(line)
    assert [record["sample_id"] for record in import_yolo(tmp_path, data).records] == [sample_id]


@pytest.mark.parametrize(("orientation", "size"), [(3, STORED), (6, (60, 60))])
def test_exif_rotation_that_keeps_size_needs_exif_option(tmp_path, orientation, size):
    marked(tmp_path / "images" / "a.png", orientation, size)
    assert imported(tmp_path, size).tally.images_left_out == {record_writer.TURNED: 1}


def test_mask_of_stored_pixels_follows_exif_orientation(tmp_path):
    picture(tmp_path / "images" / "1.png", (100, 200), orientation=6)
    mask = {"size": [200, 100], "counts": [0, 100 * 200]}
    (tmp_path / "set").mkdir()
    data = DataSet(tmp_path / "set", [annotation(1, bbox=(0, 0, 100, 200), segmentation=mask)])
    (tmp_path / "images" / "1.png").replace(data.images / "1.png")
    (record,) = data.records(geometry="poly", exif="raw")
    assert (record["width"], record["height"], data.tally.objects_left_out) == (200, 100, {})
    assert {min(bins(record["objects"][0])), max(bins(record["objects"][0]))} == {0, 999}


@pytest.mark.parametrize(("most", "classes"), [(2, None), (1, {"cat"})])
def test_max_objects_counts_only_selected_classes(tmp_path, most, classes):
    data = DataSet(tmp_path, [annotation(1), annotation(2, category=18)])
    assert len(data.records(max_objects=most, classes=classes)) == 1


def test_image_with_more_objects_than_allowed_is_left_out(tmp_path):
    data = DataSet(tmp_path, [annotation(1), annotation(2, category=18)])
    with pytest.raises(record_writer.NothingKept):
        data.records(max_objects=1)


def test_only_unused_class_of_filter_is_reported(tmp_path):
    data = DataSet(tmp_path, [annotation(1), annotation(2, category=18)])
    data.records(classes={"cat", "bird"})
    assert data.tally.names[record_writer.UNSEEN_CLASS] == ["bird; there is cat, dog"]


def test_each_mask_hole_is_counted(tmp_path):
    mask = np.zeros((200, 100), dtype=np.uint8, order="F")
    mask[20:180, 10:90] = 1
    mask[40:50, 30:40] = mask[100:120, 30:40] = 0
    runs = {"size": [200, 100], "counts": reference.encode(mask)["counts"].decode()}
    data = DataSet(tmp_path, [annotation(1, segmentation=runs)])
    assert len(data.records(geometry="poly")[0]["objects"]) == 1
    assert data.tally.changed[record_writer.HOLES] == 2


def test_outline_without_area_becomes_box(tmp_path):
    back_and_forth = [10, 10, 60, 60, 10, 10, 60, 60]
    data = DataSet(tmp_path, [annotation(1, segmentation=[back_and_forth])])
    (record,) = data.records(geometry="poly")
    assert bins(record["objects"][0]) == [100, 50, 600, 50, 600, 300, 100, 300]
    assert data.tally.changed[record_writer.NO_OUTLINE] == 1


@pytest.mark.parametrize(("out", "counted"), [(0.9, 0), (1.1, 1)])
def test_outline_clipped_by_more_than_one_pixel_is_counted(tmp_path, out, counted):
    outline = [-out, 10, 60, 10, 60, 60, -out, 60]
    data = DataSet(tmp_path, [annotation(1, segmentation=[outline])])
    (record,) = data.records(geometry="poly")
    assert data.tally.changed[record_writer.OUTLINE_CLIPPED] == counted
    assert min(bins(record["objects"][0])) == 0
