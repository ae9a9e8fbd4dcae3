"""Pascal VOC's annotations become records, each oddity by its rule."""

import os

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, record_writer, voc
from stage2_trainer.prepare.voc import VocChoice
from tests.unit.trainer.prepare.odd_sets import import_voc, picture, voc_object
from tests.unit.trainer.prepare.odd_sets import voc as written

GOOD = voc_object("dog", (11, 21, 50, 100))
BINS = [100, 100, 500, 500]  # pixels 11 to 50 of 100 lie from 10 to 50


def test_boxes_begin_at_pixel_one_and_hold_their_last(tmp_path):
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": voc_object() + GOOD}), order="file")
    assert found.objects == [("cat", [0, 0, 999, 999]), ("dog", BINS)]
    assert found.counts == {}
    assert found.records[0]["images"] == ["../voc/JPEGImages/a.jpg"]


def test_an_option_declares_boxes_that_count_from_zero(tmp_path):
    source = written(tmp_path / "voc", {"a": voc_object("cat", (0, 0, 50, 100))})
    assert import_voc(tmp_path, source, VocChoice(from_zero=True)).objects == [("cat", [0, 0, 500, 500])]
    (tmp_path / "out" / "x.jsonl").unlink()
    assert import_voc(tmp_path, source).counts == {voc.FROM_ZERO: 1}


OBJECTS = {
    "difficult": (voc_object(difficult=1), {voc.DIFFICULT: 1}),
    "difficult in a word": (voc_object(difficult="true"), {voc.DIFFICULT: 1}),
    "no name": (voc_object(""), {voc.NO_NAME: 1}),
    "three numbers": (voc_object(box=(1, 2, 3)), {annotations.BROKEN_BOX: 1}),
    "words": (voc_object(box=("a", 2, 3, 4)), {annotations.BROKEN_BOX: 1}),
    "infinite": (voc_object(box=(1, 2, "inf", 4)), {annotations.BROKEN_BOX: 1}),
    "no box": ("<object><name>cat</name></object>", {annotations.BROKEN_BOX: 1}),
    "reversed": (voc_object(box=(50, 50, 10, 90)), {record_writer.NO_AREA: 1}),
    "outside": (voc_object(box=(200, 10, 300, 90)), {record_writer.NO_AREA: 1}),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_an_odd_object_is_left_out_and_counted(tmp_path, case):
    odd, counts = OBJECTS[case]
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": odd + GOOD}))
    assert (found.objects, found.counts) == ([("dog", BINS)], counts)


def test_difficult_objects_may_be_kept_and_truncated_ones_are(tmp_path):
    objects = voc_object("cat", (11, 21, 50, 100), difficult=1, truncated=1)
    source = written(tmp_path / "voc", {"a": objects})
    assert import_voc(tmp_path, source, VocChoice(difficult=True)).objects == [("cat", BINS)]


IMAGES = {
    "no XML": ("<?xml", {voc.BROKEN_ANNOTATION: 1}),
    "an unknown encoding": ("<?xml version='1.0' encoding='foo'?><annotation/>", {voc.BROKEN_ANNOTATION: 1}),
    "another document": ("<?xml version='1.0'?><html/>", {voc.BROKEN_ANNOTATION: 1}),
    "entities that multiply": (
        "<?xml version='1.0'?><!DOCTYPE x [<!ENTITY a0 'aaaaaaaaaa'>"
        + "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10}'>" for n in range(1, 12))
        + "]><annotation>&a11;</annotation>",
        {voc.BROKEN_ANNOTATION: 1},
    ),
}


@pytest.mark.parametrize("case", IMAGES)
def test_a_broken_annotation_file_leaves_its_image_out(tmp_path, case):
    odd, counts = IMAGES[case]
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": odd, "b": GOOD}))
    assert [record["sample_id"] for record in found.records] == ["b"]
    assert found.counts == counts


def test_a_split_names_its_images_and_those_without_annotations_are_counted(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "b": GOOD})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("b  1\nlost -1\n\n")
    found = import_voc(tmp_path, source, VocChoice("train"))
    assert [record["sample_id"] for record in found.records] == ["b"]
    assert found.counts == {voc.NO_ANNOTATION: 1}
    with pytest.raises(ConfigError, match=r"--split: 'val'; .*which has train"):
        import_voc(tmp_path / "again", source, VocChoice("val"))


def test_an_image_is_found_by_its_annotations_name_where_another_is_written(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD}, file_name="renamed.png")
    assert import_voc(tmp_path, source).records[0]["images"] == ["../voc/JPEGImages/a.jpg"]


def test_an_image_whose_name_goes_on_is_another(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "a.1": GOOD}, file_name="a")
    names = [record["images"] for record in import_voc(tmp_path, source).records]
    assert names == [["../voc/JPEGImages/a.1.jpg"], ["../voc/JPEGImages/a.jpg"]]


def test_a_folder_is_listed_once_for_all_names_that_are_not_there(tmp_path, monkeypatch):
    source = written(tmp_path / "voc", {str(number): GOOD for number in range(9)}, file_name="a")
    listed, listdir = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: listed.append(folder) or listdir(folder))
    assert len(import_voc(tmp_path, source).records) == 9
    assert len(listed) <= 3  # annotations, images by name, and those that are left


def test_an_ending_may_be_in_capitals(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "b": GOOD})
    (source / "Annotations" / "a.xml").rename(source / "Annotations" / "a.XML")
    assert [record["sample_id"] for record in import_voc(tmp_path, source).records] == ["a", "b"]


def test_an_image_without_annotations_is_counted(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD}, images=["a", "lost"])
    assert import_voc(tmp_path, source).counts == {voc.NO_ANNOTATION: 1}


def test_names_of_a_split_may_have_spaces(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "a b": GOOD, "a b 1": GOOD})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("a b 1\na b  -1\na lost 1\n")
    found = import_voc(tmp_path, source, VocChoice("train"))
    assert [record["sample_id"] for record in found.records] == ["a b 1", "a b"]
    assert found.counts == {voc.NO_ANNOTATION: 1}


def test_images_and_annotations_may_share_a_folder(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD})
    picture(source / "Annotations" / "a.jpg")
    assert import_voc(tmp_path, source / "Annotations").objects == [("dog", BINS)]


@pytest.mark.parametrize(("size", "counts"), [((0, 0), {}), (None, {}), ((200, 100), {record_writer.OTHER_SIZE: 1})])
def test_sizes_are_compared_where_the_annotations_say_one(tmp_path, size, counts):
    assert import_voc(tmp_path, written(tmp_path / "voc", {"a": GOOD}, size=size)).counts == counts


def test_a_folder_without_annotations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must have annotation files"):
        import_voc(tmp_path, tmp_path)
