"""Pascal VOC's annotations become records, each oddity by its rule."""

import os
import re

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, record_writer, shapes, voc
from stage2_trainer.prepare.voc import VocChoice
from tests.unit.trainer.prepare.odd_sets import import_voc, picture, voc_object
from tests.unit.trainer.prepare.odd_sets import voc as written

GOOD = voc_object("dog", (11, 21, 50, 100))
BINS = [100, 100, 500, 500]  # pixels 11 to 50 of 100 lie from 10 to 50


def test_voc_boxes_are_one_based_and_inclusive(tmp_path):
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": voc_object() + GOOD}), order="file")
    assert found.objects == [("cat", [0, 0, 999, 999]), ("dog", BINS)]
    assert found.counts == {}
    assert found.records[0]["images"] == ["../voc/JPEGImages/a.jpg"]


def test_from_zero_option_reads_zero_based_boxes(tmp_path):
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
    "no box": ("<object><name>cat</name></object>", {shapes.NO_SHAPE: 1}),
    "reversed": (voc_object(box=(50, 50, 10, 90)), {record_writer.REVERSED: 1}),
    "outside": (voc_object(box=(200, 10, 300, 90)), {record_writer.BEYOND: 1}),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_odd_object_is_left_out_and_counted(tmp_path, case):
    odd, counts = OBJECTS[case]
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": odd + GOOD}))
    assert (found.objects, found.counts) == ([("dog", BINS)], counts)


def test_difficult_objects_are_kept_by_option_and_truncated_ones_always(tmp_path):
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
def test_image_with_broken_annotation_file_is_left_out(tmp_path, case):
    odd, counts = IMAGES[case]
    found = import_voc(tmp_path, written(tmp_path / "voc", {"a": odd, "b": GOOD}))
    assert [record["sample_id"] for record in found.records] == ["b"]
    assert found.counts == counts


def test_split_lists_images_and_missing_annotations_are_counted(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "b": GOOD})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("b  1\nlost -1\n\n")
    found = import_voc(tmp_path, source, VocChoice("train"))
    assert [record["sample_id"] for record in found.records] == ["b"]
    assert found.counts == {voc.NO_ANNOTATION: 1}
    with pytest.raises(ConfigError, match=r"--split: 'val'; .*which has train"):
        import_voc(tmp_path / "again", source, VocChoice("val"))


def test_image_is_found_by_annotation_name_if_written_name_is_missing(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD}, file_name="renamed.png")
    assert import_voc(tmp_path, source).records[0]["images"] == ["../voc/JPEGImages/a.jpg"]


def test_image_with_longer_name_is_not_mistaken_for_annotated_one(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "a.1": GOOD}, file_name="a")
    names = [record["images"] for record in import_voc(tmp_path, source).records]
    assert names == [["../voc/JPEGImages/a.1.jpg"], ["../voc/JPEGImages/a.jpg"]]


def test_image_folder_is_listed_once_for_all_missing_names(tmp_path, monkeypatch):
    source = written(tmp_path / "voc", {str(number): GOOD for number in range(9)}, file_name="a")
    listed, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda folder, **how: listed.append(folder) or walk(folder, **how))
    assert len(import_voc(tmp_path, source).records) == 9
    assert len(listed) == 2  # annotations and images


def boxes(names):
    """Annotations by name, each with a box of its own width."""
    return {name: voc_object(name, (1, 1, 10 * number, 50)) for number, name in enumerate(names, start=1)}


def widths(found):
    """The image and the width of the box, in tenths, of each record."""
    return {
        record["sample_id"]: (record["images"][0].removeprefix("../voc/"), one[1][2] // 100)
        for record, one in zip(found.records, found.objects, strict=True)
    }


def renamed(source, **names):
    """Change the image that each annotation file names."""
    for name, file_name in names.items():
        path = source / "Annotations" / f"{name}.xml"
        path.write_text(re.sub("<filename>.*</filename>", f"<filename>{file_name}</filename>", path.read_text()))
    return source


def test_own_image_is_preferred_over_named_image_of_another_annotation(tmp_path):
    source = renamed(written(tmp_path / "voc", boxes("abc")), b="a.jpg", c="a.jpg")
    found = import_voc(tmp_path, source)
    assert widths(found) == {name: (f"JPEGImages/{name}.jpg", n) for n, name in enumerate("abc", start=1)}
    assert found.counts == {voc.OWN_IMAGE: 2}
    assert found.tally.names[voc.OWN_IMAGE] == ["b.xml: b.jpg", "c.xml: c.jpg"]


def test_image_named_by_two_annotations_is_used_by_neither_with_own_image(tmp_path):
    source = renamed(written(tmp_path / "voc", boxes("bc"), images="abc"), b="a.jpg", c="a.jpg")
    found = import_voc(tmp_path, source)
    assert widths(found) == {"b": ("JPEGImages/b.jpg", 1), "c": ("JPEGImages/c.jpg", 2)}
    assert found.counts == {voc.OWN_IMAGE: 2, voc.NO_ANNOTATION: 1}


def test_swapped_image_names_give_each_annotation_its_own_image(tmp_path):
    found = import_voc(tmp_path, renamed(written(tmp_path / "voc", boxes("ab")), a="b.jpg", b="a.jpg"))
    assert widths(found) == {"a": ("JPEGImages/a.jpg", 1), "b": ("JPEGImages/b.jpg", 2)}


def test_named_image_that_no_other_annotation_claims_is_used_and_counted(tmp_path):
    found = import_voc(tmp_path, renamed(written(tmp_path / "voc", boxes("a"), images="ab"), a="b.jpg"))
    assert widths(found) == {"a": ("JPEGImages/b.jpg", 1)}
    assert found.counts == {voc.NAMED_IMAGE: 1}


def test_image_with_two_annotation_files_is_counted(tmp_path):
    source = renamed(written(tmp_path / "voc", boxes(["a", "copy of a"]), images="a"), **{"copy of a": "a.jpg"})
    found = import_voc(tmp_path, source)
    assert widths(found) == {"a": ("JPEGImages/a.jpg", 1), "copy of a": ("JPEGImages/a.jpg", 2)}
    assert found.counts == {voc.SHARED_IMAGE: 1}


@pytest.mark.parametrize("split", [None, "train"])
def test_annotation_subfolders_are_read_and_counted(tmp_path, split):
    names = ["a", "x/a", "x/y/b"]
    (tmp_path / "voc" / "Annotations" / "x" / "y").mkdir(parents=True)
    source = written(tmp_path / "voc", boxes(names))
    for name in names:
        renamed(source, **{name: f"{name[-1]}.jpg"})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("a\nx/a\nb\n")
    found = import_voc(tmp_path, source, VocChoice(split))
    assert widths(found) == {name: (f"JPEGImages/{name}.jpg", n) for n, name in enumerate(names, start=1)}
    assert found.counts == {voc.BELOW: 2}
    assert found.tally.names[voc.BELOW] == ["x", "x/y"]


def test_subfolders_with_images_and_annotations_are_read(tmp_path):
    """As tools export splits, side by side."""
    source = written(tmp_path / "voc", boxes("a"))
    for part in ("train", "valid"):
        (tmp_path / "set" / part).mkdir(parents=True)
        (tmp_path / "set" / part / "a.xml").write_text((source / "Annotations" / "a.xml").read_text())
        picture(tmp_path / "set" / part / "a.jpg")
    found = import_voc(tmp_path, tmp_path / "set")
    assert [record["images"] for record in found.records] == [["../set/train/a.jpg"], ["../set/valid/a.jpg"]]
    assert found.counts == {voc.BELOW: 2}


def test_images_in_flat_folder_are_found_for_annotations_in_subfolder(tmp_path):
    (tmp_path / "voc" / "Annotations" / "x").mkdir(parents=True)
    source = written(tmp_path / "voc", boxes(["x/a"]), images=["a"])
    found = import_voc(tmp_path, renamed(source, **{"x/a": "gone.jpg"}))
    assert widths(found) == {"x/a": ("JPEGImages/a.jpg", 1)}


def test_folder_with_several_datasets_is_refused_with_their_names(tmp_path):
    for year in ("VOC2007", "VOC2012"):
        written(tmp_path / "devkit" / year, {"a": GOOD})
    with pytest.raises(ConfigError, match=r"data sets in VOC2007, VOC2012; give .*devkit/VOC2007"):
        import_voc(tmp_path, tmp_path / "devkit")


def test_split_may_list_images_with_file_extension(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "b": GOOD})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("a.jpg\nb.jpg 1\n")
    found = import_voc(tmp_path, source, VocChoice("train"))
    assert ([record["sample_id"] for record in found.records], found.counts) == (["a", "b"], {})


FLAT = "<bndbox><xmin>11</xmin><ymin>91</ymin><xmax>90</xmax><ymax>110</ymax></bndbox>"  # 80 x 20 about (50, 100)
SHAPES = {
    "rotated, by roLabelImg": (
        "<robndbox><cx>50</cx><cy>100</cy><w>80</w><h>20</h><angle>1.5707963</angle></robndbox>",
        [400, 300, 600, 700],
        [600, 300, 600, 700, 400, 700, 400, 300],
        {shapes.ROTATED: 1},
    ),
    "rotated, by CVAT": (
        f"<attributes><attribute><name>rotation</name><value>90.0</value></attribute></attributes>{FLAT}",
        [400, 300, 600, 700],
        [600, 300, 600, 700, 400, 700, 400, 300],
        {shapes.ROTATED: 1},
    ),
    **{
        f"rotated, {name}": (inner, [400, 300, 600, 700], [600, 300, 600, 700, 400, 700, 400, 300], {shapes.ROTATED: 1})
        for name, inner in {
            "by an angle of the object": f"<angle>90</angle>{FLAT}",
            "by an angle of the box": FLAT.replace("</bndbox>", "<angle>90.0</angle></bndbox>"),
            "by a rotation of the object": f"<rotation>90</rotation>{FLAT}",
        }.items()
    },
    "rotated by degrees or radians": (f"<angle>1.57</angle>{FLAT}", None, None, {shapes.UNCLEAR_ANGLE: 1}),
    "not rotated, by CVAT": (
        f"<attributes><attribute><name>rotation</name><value>0.0</value></attribute></attributes>{FLAT}",
        [100, 450, 900, 550],
        [100, 450, 900, 450, 900, 550, 100, 550],
        {},
    ),
    "a polygon beside the box": (
        f"<polygon><x1>10</x1><y1>90</y1><x2>90</x2><y2>90</y2><x3>50</x3><y3>110</y3></polygon>{FLAT}",
        [100, 450, 900, 550],
        [100, 450, 900, 450, 500, 550],
        {},
    ),
    "a polygon alone": (
        "<polygon><pt><x>10</x><y>90</y></pt><pt><x>90</x><y>90</y></pt><pt><x>50</x><y>110</y></pt></polygon>",
        [100, 450, 900, 550],
        [100, 450, 900, 450, 500, 550],
        {shapes.FROM_OUTLINE: 1},
    ),
    **{
        f"a polygon beside {name}": (
            f"<polygon><x1>10</x1><y1>90</y1><x2>90</x2><y2>90</y2><x3>50</x3><y3>110</y3></polygon>{no_box}",
            [100, 450, 900, 550],
            [100, 450, 900, 450, 500, 550],
            {shapes.FROM_OUTLINE: 1},
        )
        for name, no_box in {
            "an empty box": "<bndbox/>",
            "a box of zeros": "<bndbox><xmin>0</xmin><ymin>0</ymin><xmax>0</xmax><ymax>0</ymax></bndbox>",
            "a box of no numbers": "<bndbox><xmin>nan</xmin><ymin/><xmax>NaN</xmax><ymax/></bndbox>",
        }.items()
    },
    "a polygon that is no polygon": (
        "<polygon><x1>a</x1><y1>90</y1></polygon>",
        None,
        None,
        {annotations.BROKEN_OUTLINE: 1},
    ),
    "a polygon without a point": ("<polygon/>", None, None, {shapes.NO_SHAPE: 1}),
    "rotated by words": (
        "<robndbox><cx>50</cx><cy>100</cy><w>80</w><h>20</h><angle>left</angle></robndbox>",
        None,
        None,
        {annotations.BROKEN_BOX: 1},
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_rotated_boxes_and_polygons_become_bounds_or_outlines(tmp_path, case):
    inner, box, outline, counts = SHAPES[case]
    source = written(tmp_path / "voc", {"a": f"<object><name>cat</name>{inner}</object>{GOOD}"})
    for geometry, bins in (("bbox", box), ("poly", outline)):
        found = import_voc(tmp_path / geometry, source, geometry=geometry, order="file")
        assert (found.objects[:-1], found.counts) == ([("cat", bins)] if bins else [], counts)


def test_rotated_normalized_box_is_left_out(tmp_path):
    turned = "<robndbox><cx>.5</cx><cy>.5</cy><w>.8</w><h>.1</h><angle>1.57</angle></robndbox>"
    source = written(tmp_path / "voc", {"a": f"<object><name>cat</name>{turned}</object>"})
    found = import_voc(tmp_path, source, VocChoice(units="shares"))
    assert (found.records, found.counts) == ([], {shapes.ROTATED_SHARES: 1})


def test_file_extension_may_be_uppercase(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "b": GOOD})
    (source / "Annotations" / "a.xml").rename(source / "Annotations" / "a.XML")
    assert [record["sample_id"] for record in import_voc(tmp_path, source).records] == ["a", "b"]


def test_image_without_annotations_is_counted(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD}, images=["a", "lost"])
    assert import_voc(tmp_path, source).counts == {voc.NO_ANNOTATION: 1}


def test_split_names_may_contain_spaces(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD, "a b": GOOD, "a b 1": GOOD})
    (source / voc.SPLITS).mkdir(parents=True)
    (source / voc.SPLITS / "train.txt").write_text("a b 1\na b  -1\na lost 1\n")
    found = import_voc(tmp_path, source, VocChoice("train"))
    assert [record["sample_id"] for record in found.records] == ["a b 1", "a b"]
    assert found.counts == {voc.NO_ANNOTATION: 1}


def test_images_and_annotations_may_share_folder(tmp_path):
    source = written(tmp_path / "voc", {"a": GOOD})
    picture(source / "Annotations" / "a.jpg")
    assert import_voc(tmp_path, source / "Annotations").objects == [("dog", BINS)]


@pytest.mark.parametrize(("size", "counts"), [((0, 0), {}), (None, {}), ((200, 100), {record_writer.OTHER_SIZE: 1})])
def test_annotated_size_is_compared_with_image_if_present(tmp_path, size, counts):
    assert import_voc(tmp_path, written(tmp_path / "voc", {"a": GOOD}, size=size)).counts == counts


def test_folder_without_annotations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must have annotation files"):
        import_voc(tmp_path, tmp_path)
