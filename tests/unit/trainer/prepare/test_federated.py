"""LVIS and Objects365 through `stage2 import coco`: their files as published, and odd ones."""

import json

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, coco, record_writer, shapes
from stage2_trainer.prepare.coco import read_coco
from tests.unit.trainer.prepare.odd_sets import Imported, picture

PLACE = ("cat", [100, 100, 600, 500])
URL = "http://images.cocodataset.org/train2017/000000000017.jpg"
NAME = "train2017/000000000017.jpg"
IMAGE = {"id": 17, "coco_url": URL, "width": 100, "height": 200}
BOX = {"id": 1, "image_id": 17, "category_id": 1, "bbox": [10.0, 20.0, 50.0, 80.0]}
CATEGORIES = [
    {"id": 1, "name": "cat", "synset": "cat.n.01", "synonyms": ["cat"], "frequency": "f"},
    {"id": 2, "name": "dog", "frequency": "r"},
]
O365 = {"id": 17, "file_name": "images/v1/patch8/objects365_v1_00000017.jpg", "width": 100, "height": 200}
UNPACKED = "patch8/objects365_v1_00000017.jpg"
UNUSED = {coco.NO_OBJECT: 1}
NEGATIVE = {"neg_category_ids": ["dog"]}


def imported(folder, image, *boxes, file=NAME, categories=CATEGORIES) -> Imported:
    picture(folder / "set" / file)
    document = {"images": [image], "annotations": [*boxes], "categories": categories}
    (folder / "x.json").write_text(json.dumps(document))
    read = lambda tally: read_coco(folder / "x.json", folder / "set", tally)  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read)


def lvis(**changes):
    return {**IMAGE, **changes}


SHAPE = [[10, 20, 60, 20, 60, 100, 10, 100]]
LISTS = {"neg_category_ids": [2], "not_exhaustive_category_ids": [1]}

# An image, its annotation, where its file lies, and the metadata and counts beside the object.
FILES = {
    "LVIS v1, with the folders of COCO": (lvis(), BOX, NAME, {}, {}),
    "LVIS v1, with all images in one folder": (lvis(), BOX, "000000000017.jpg", {}, {}),
    "LVIS v0.5, whose names have a mark that files lack": (
        lvis(file_name="COCO_val2014_000000000017.jpg"), BOX, NAME, {}, {}
    ),
    "both lists": (
        lvis(**LISTS), BOX, NAME, {**NEGATIVE, "not_exhaustive_category_ids": ["cat"]}, {}
    ),
    "empty lists": (lvis(neg_category_ids=[], not_exhaustive_category_ids=None), BOX, NAME, {}, {}),
    "ids as text and as floats": (lvis(neg_category_ids=["2", 2.0]), BOX, NAME, NEGATIVE, {}),
    "an unknown id": (lvis(neg_category_ids=[2, 999]), BOX, NAME, NEGATIVE, {coco.NO_FEDERATED: 1}),
    "an outline, and no box": (
        lvis(), {key: BOX[key] for key in ("id", "image_id", "category_id")} | {"segmentation": SHAPE}, NAME, {},
        {shapes.FROM_OUTLINE: 1},
    ),
    "no size": ({"id": 17, "coco_url": URL}, BOX, NAME, {}, {}),
    "Objects365, as unpacked": (O365, {**BOX, "isfake": 0, "isreflected": 0, "iscrowd": 0}, UNPACKED, {}, {}),
    "Objects365, in the folders that it names": (O365, BOX, O365["file_name"], {}, {}),
    "Objects365 v2": (
        {**O365, "file_name": "images/v2/patch16/objects365_v2_00000017.jpg"}, BOX,
        "patch16/objects365_v2_00000017.jpg", {}, {},
    ),
    "Objects365 with a list": ({**O365, "neg_category_ids": [2]}, BOX, UNPACKED, NEGATIVE, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_file_is_read_with_its_federated_lists(tmp_path, case):
    image, box, file, metadata, counts = FILES[case]
    found = imported(tmp_path, image, box, file=file)
    assert (found.objects, found.counts) == ([PLACE], counts | UNUSED)
    assert found.records[0].get("metadata", {}) == metadata


# An image and its annotation, of which no object is left, and what is counted.
LEFT_OUT = {
    "a group of Objects365": (O365, {**BOX, "iscrowd": 1}, {annotations.CROWD: 1}),
    "a box outside": (O365, {**BOX, "bbox": [200, 20, 50, 80]}, {record_writer.BEYOND: 1}),
    "a box without area": (O365, {**BOX, "bbox": [10, 20, 0, 80]}, {record_writer.NO_AREA: 1}),
    "normalized coordinates": (O365, {**BOX, "bbox": [0.1, 0.1, 0.5, 0.4]}, {annotations.SHARES: 1}),
    "another size": ({**O365, "width": 7}, BOX, {record_writer.OTHER_SIZE: 1}),
    "an image that is not there": ({**O365, "file_name": "images/v1/patch9/b.jpg"}, BOX, {record_writer.MISSING: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_is_left_out_is_counted(tmp_path, case):
    image, box, counts = LEFT_OUT[case]
    found = imported(tmp_path, image, box, file=UNPACKED)
    assert (found.objects, found.counts) == ([], counts | UNUSED)


@pytest.mark.parametrize(
    ("image", "rule"),
    [
        (lvis(neg_category_ids=5), r"images 17\.neg_category_ids: 5; must be a list"),
        (lvis(not_exhaustive_category_ids=[[1]]), r"images 17\.not_exhaustive_category_ids"),
        ({"id": 17, "coco_url": 5}, r"images 17\.file_name"),
        ({"id": 17, "coco_url": "x/\0.jpg"}, r"images 17\.file_name"),
    ],
)
def test_broken_image_entry_is_refused(tmp_path, image, rule):
    with pytest.raises(ConfigError, match=rule):
        imported(tmp_path, image, BOX)
