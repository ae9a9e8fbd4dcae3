"""COCO's annotations become records, and what is left out is counted by its reason; odd files: test_odd_files."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as reference

from stage2_api.coordinates import coord_bin
from stage2_api.errors import ConfigError
from stage2_trainer.data.records import load_records
from stage2_trainer.prepare import annotations, coco, record_writer, shapes
from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.outlines import area, mask_of_runs, outlines_of_mask, simplified
from stage2_trainer.prepare.record_writer import RecordChoice, write_records

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 18, "name": " dog "}]
SQUARE = [10, 10, 60, 10, 60, 60, 10, 60]


def annotation(number, image=1, category=3, bbox=(10, 10, 50, 50), **more):
    return {"id": number, "image_id": image, "category_id": category, "bbox": list(bbox), "iscrowd": 0, **more}


class DataSet:
    """A COCO file in a folder of its own, with images of 100 by 200 pixels."""

    def __init__(self, folder: Path, annotations, images=((1, "1.png"),), categories=CATEGORIES, **entry):
        self.images, self.file, self.output = folder / "images", folder / "instances.json", folder / "out" / "x.jsonl"
        self.images.mkdir()
        for _, name in images:
            Image.new("RGB", (100, 200)).save(self.images / name)
        entries = [{"id": number, "file_name": name, "width": 100, "height": 200, **entry} for number, name in images]
        self.document = {"images": entries, "annotations": list(annotations), "categories": categories}
        self.tally = Tally()

    def records(self, **choice):
        """Import, and return the lines."""
        self.file.write_text(json.dumps(self.document))
        chosen = RecordChoice(**choice)
        found = read_coco(self.file, self.images, self.tally, outlines=chosen.geometry == "poly")
        write_records(found, self.output, chosen, self.tally)
        return [json.loads(line) for line in self.output.read_text().splitlines()]


def bins(one):
    return [coord_bin(token) for token in one.get("bbox_2d") or one["poly"]]


def test_id_given_as_number_or_text_is_same_id(tmp_path):
    categories = [{"id": "3", "name": "cat"}]
    data = DataSet(tmp_path, [annotation(1, image="1"), annotation(2)], categories=categories)
    (record,) = data.records()
    assert [one["desc"] for one in record["objects"]] == ["cat", "cat"]


SAME_IDS = [(1, 1.0), (1.0, 1), (1.0, "1"), (1, "1.0"), ("1", 1.0), (1, " 1 "), ("000001", 1), (0, "0"), (-3, "-3.0")]
SAME_IDS += [
    (2**53 + 1, 2**53 + 1),
    (2**53 + 1, str(2**53 + 1)),
    (10**30, str(10**30)),
    ("a-1", "a-1"),
    (float(2**52), 2**52),
]


@pytest.mark.parametrize(("listed", "named"), SAME_IDS, ids=repr)
def test_ids_are_compared_as_numbers_if_both_are_numeric(tmp_path, listed, named):
    categories = [{"id": listed, "name": "cat"}]
    lists = {"neg_category_ids": [named]}
    data = DataSet(tmp_path, [annotation(1, image=named, category=named)], ((listed, "1.png"),), categories, **lists)
    (record,) = data.records()
    assert [one["desc"] for one in record["objects"]] == ["cat"]
    assert record["metadata"] == {"neg_category_ids": ["cat"]}
    assert (record["sample_id"], data.tally.changed) == (str(listed).removesuffix(".0"), {})


@pytest.mark.parametrize(
    "named", [1.5, True, None, "1.5", "1e0", "one", float("nan"), float("inf"), "１", [1], ""], ids=repr
)
def test_id_that_is_not_same_number_matches_no_image(tmp_path, named):
    data = DataSet(tmp_path, [annotation(1, image=named), annotation(2)])
    assert len(data.records()[0]["objects"]) == 1
    (reason,) = data.tally.objects_left_out.elements()
    (shown,) = data.tally.names[reason]
    assert shown.startswith("annotation 1: ")


@pytest.mark.parametrize("named", [float(2**53), float(2**53 + 2), 1e300], ids=repr)
def test_float_id_too_large_to_be_exact_is_left_out(tmp_path, named):
    """It equals the number of another image."""
    images = ((2**53, "1.png"), (2**53 + 1, "2.png"), (2**53 + 2, "3.png"), (1, "4.png"))
    data = DataSet(tmp_path, [annotation(1, image=named), annotation(2)], images)
    assert [len(record["objects"]) for record in data.records()] == [0, 0, 0, 1]
    assert data.tally.objects_left_out == {annotations.ROUNDED_ID: 1}


def test_text_ids_with_leading_zeros_stay_separate_ids(tmp_path):
    images = (("7", "1.png"), ("007", "2.png"))
    data = DataSet(tmp_path, [annotation(1, "007"), annotation(2, "7"), annotation(3, "007"), annotation(4, 7)], images)
    assert [len(record["objects"]) for record in data.records()] == [1, 2]
    assert data.tally.names[coco.NO_IMAGE] == ["annotation 4: image_id: 7"]


@pytest.mark.parametrize("second", [1, 1.0])
def test_two_images_with_same_id_are_refused(tmp_path, second):
    data = DataSet(tmp_path, [annotation(1)], ((1, "1.png"), (second, "2.png")))
    with pytest.raises(ConfigError, match=r"images\[1\]\.id: .*an id that no other has"):
        data.records()


def test_box_becomes_bins_and_category_becomes_description(tmp_path):
    data = DataSet(tmp_path, [annotation(1), annotation(2, category=18, bbox=(0, 0, 100, 200))])
    (record,) = data.records(order="file")
    assert [(one["desc"], bins(one)) for one in record["objects"]] == [
        ("cat", [100, 50, 600, 300]),
        ("dog", [0, 0, 999, 999]),
    ]
    assert (record["width"], record["height"], record["images"]) == (100, 200, ["../images/1.png"])
    (read,) = load_records(data.output)
    assert read.images == (str(data.images / "1.png"),)
    assert [one.bins for one in read.objects] == [(100, 50, 600, 300), (0, 0, 999, 999)]


def test_objects_are_written_in_reading_order_or_file_order(tmp_path):
    boxes = [(50, 100, 9, 9), (60, 10, 9, 9), (5, 10, 9, 9)]
    data = DataSet(tmp_path, [annotation(i, bbox=box) for i, box in enumerate(boxes)])
    assert [bins(one)[:2] for one in data.records()[0]["objects"]] == [[50, 50], [600, 50], [500, 500]]
    data.output.unlink()
    assert [bins(one)[0] for one in data.records(order="file")[0]["objects"]] == [500, 600, 50]


@pytest.mark.parametrize("geometry", ["bbox", "poly"])
def test_objects_in_row_are_ordered_left_to_right_despite_different_tops(tmp_path, geometry):
    draw = random.Random(1)
    shelves = [[(5 + 19 * column, 10 + 65 * shelf + draw.randint(0, 3), 15, 44) for column in range(5)]
               for shelf in range(3)]  # fmt: skip
    mixed = draw.sample([box for shelf in shelves for box in shelf], 15)
    data = DataSet(tmp_path, [annotation(i, bbox=box) for i, box in enumerate(mixed)])
    (record,) = data.records(geometry=geometry)
    assert [bins(one)[0] for one in record["objects"]] == 3 * [50 + 190 * column for column in range(5)]


@pytest.mark.parametrize("word", ["0", "false", "False", 0.0, None, ""])
def test_falsy_iscrowd_values_are_not_crowd(tmp_path, word):
    data = DataSet(tmp_path, [annotation(1, iscrowd=word)])
    assert len(data.records()[0]["objects"]) == 1


LEFT_OUT = {
    "crowd": (annotation(1, iscrowd=1), annotations.CROWD),
    "crowd as text": (annotation(1, iscrowd="1"), annotations.CROWD),
    "no category": (annotation(1, category=99), annotations.NO_CATEGORY),
    "a list as category": (annotation(1, category=[3]), annotations.NO_CATEGORY),
    "no image": (annotation(1, image=9), coco.NO_IMAGE),
    "three numbers": (annotation(1, bbox=(1, 2, 3)), annotations.BROKEN_BOX),
    "five numbers": (annotation(1, bbox=(50, 50, 40, 20, 30)), annotations.FIVE_NUMBERS),
    "a text": (annotation(1, bbox=("1", 2, 3, 4)), annotations.BROKEN_BOX),
    "not a number": (annotation(1, bbox=(float("nan"), 2, 3, 4)), annotations.BROKEN_BOX),
    "no width": (annotation(1, bbox=(1, 2, 0, 4)), record_writer.NO_AREA),
    "negative": (annotation(1, bbox=(1, 2, -3, 4)), record_writer.REVERSED),
    "outside": (annotation(1, bbox=(101, 2, 3, 4)), record_writer.BEYOND),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_broken_object_is_left_out_and_counted(tmp_path, case):
    broken, reason = LEFT_OUT[case]
    data = DataSet(tmp_path, [broken, annotation(2, category=18)])
    (record,) = data.records()
    assert [one["desc"] for one in record["objects"]] == ["dog"]
    assert data.tally.objects_left_out == {reason: 1}
    assert len(data.tally.names[reason]) == 1


def test_classes_limit_and_max_objects_filter_records(tmp_path):
    images = [(number, f"{number}.png") for number in range(1, 5)]
    found = [annotation(1, image=1), annotation(2, image=1, category=18), *(annotation(i, image=2) for i in (3, 4, 5))]
    data = DataSet(tmp_path, found, images=images)
    records = data.records(classes=frozenset({"cat"}), max_objects=2, limit=2)
    assert [record["sample_id"] for record in records] == ["1", "3"]
    assert [one["desc"] for one in records[0]["objects"]] == ["cat"]
    assert data.tally.images_left_out == {record_writer.CROWDED: 1}


def test_segmentation_may_be_flat_polygon_and_empty_one_is_ignored(tmp_path):
    found = [
        annotation(1, segmentation=SQUARE),
        annotation(2, segmentation=[[]]),
        annotation(3, segmentation=[[], SQUARE]),
    ]
    data = DataSet(tmp_path, found)
    square = [100, 50, 600, 50, 600, 300, 100, 300]
    assert list(map(bins, data.records(geometry="poly", order="file")[0]["objects"])) == [square] * 3
    assert data.tally.changed == {coco.NO_OBJECT: 1}


@pytest.mark.parametrize("box", [None, [], [0, 0, 0, 0], ()])
def test_mask_without_box_uses_bounds_of_its_pixels(tmp_path, box):
    mask = np.zeros((200, 100), np.uint8)
    mask[20:100, 10:60] = 1
    runs = reference.encode(np.asfortranarray(mask))
    runs["counts"] = runs["counts"].decode()
    data = DataSet(tmp_path, [annotation(1, bbox=box or (), segmentation=runs)])
    data.document["annotations"][0]["bbox"] = box
    assert list(map(bins, data.records()[0]["objects"])) == [[100, 100, 600, 500]]
    assert data.tally.changed[shapes.FROM_OUTLINE] == 1


def test_mask_with_wrong_size_and_no_box_is_left_out(tmp_path):
    data = DataSet(
        tmp_path, [annotation(1, bbox=(), segmentation={"size": [20, 10], "counts": [0, 200]}), annotation(2)]
    )
    assert len(data.records()[0]["objects"]) == 1
    assert data.tally.objects_left_out == {annotations.OTHER_MASK: 1}


@pytest.mark.parametrize("segmentation", [None, [], [[]], {}])
def test_object_without_box_and_outline_is_left_out(tmp_path, segmentation):
    data = DataSet(tmp_path, [annotation(1, bbox=(), segmentation=segmentation), annotation(2)])
    assert len(data.records()[0]["objects"]) == 1
    assert data.tally.objects_left_out == {shapes.NO_SHAPE: 1}


def test_normalized_outline_with_pixel_box_is_left_out_and_counted(tmp_path):
    outline = [[0.1, 0.1, 0.6, 0.1, 0.6, 0.5]]
    data = DataSet(tmp_path, [annotation(1, segmentation=outline), annotation(2)])
    assert len(data.records(geometry="poly")[0]["objects"]) == 1
    assert data.tally.objects_left_out == {annotations.SHARES: 1}


@pytest.mark.parametrize("split", ["box", "largest", "drop"])
def test_object_of_several_polygons_follows_split_objects_option(tmp_path, split):
    small, smaller = [70, 70, 80, 70, 80, 80], [1, 1, 3, 1, 3, 3]
    several = annotation(1, bbox=[0, 0, 80, 80], segmentation=[small, SQUARE, smaller])
    data = DataSet(tmp_path, [several, annotation(2, segmentation=[SQUARE])])
    square = [100, 50, 600, 50, 600, 300, 100, 300]
    objects = data.records(geometry="poly", split_objects=split, order="file")[0]["objects"]
    written = {"box": [[0, 0, 800, 0, 800, 400, 0, 400]], "largest": [square]}
    assert list(map(bins, objects)) == [*written.get(split, []), square]
    assert (data.tally.objects_left_out if split == "drop" else data.tally.changed)[record_writer.SPLIT[split]] == 1


@pytest.mark.parametrize(
    "segmentation",
    [
        [[1, 2, 3]],
        [["a"] * 6],
        [[1e308, 0, -1e308, 1e308, 0, 1]],
        [[10**400, 0, 1, 1, 2, 2]],
        {"size": [1]},
        {"size": [200, 100], "counts": [1]},
        5,
    ],
)
def test_broken_segmentation_is_left_out_and_counted(tmp_path, segmentation):
    data = DataSet(tmp_path, [annotation(1, segmentation=segmentation), annotation(2)])
    assert len(data.records(geometry="poly")[0]["objects"]) == 1
    assert data.tally.objects_left_out == {annotations.BROKEN_OUTLINE: 1}


def test_lvis_category_lists_are_kept_by_name(tmp_path):
    lists = {"neg_category_ids": [18], "not_exhaustive_category_ids": [3, 99]}
    data = DataSet(tmp_path, [annotation(1)], **lists)
    assert data.records()[0]["metadata"] == {"neg_category_ids": ["dog"], "not_exhaustive_category_ids": ["cat"]}


def test_lvis_image_is_found_by_coco_url(tmp_path):
    data = DataSet(tmp_path, [annotation(1)], file_name=None, coco_url="http://images.example/train2017/1.png")
    assert data.records()[0]["images"] == ["../images/1.png"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": None}, "list of objects images"),
        ({"annotations": [1]}, "list of objects annotations"),
        ({"images": [{"id": 1}, {"id": 1}]}, r"images\[1\]\.id"),
        ({"images": [{"id": 1}]}, "file_name"),
        ({"categories": [{"id": 1, "name": " "}]}, "non-blank"),
        ({"categories": [{"name": "x"}]}, r"categories\[0\]\.id"),
    ],
)
def test_invalid_coco_file_is_refused_and_writes_nothing(tmp_path, change, message):
    data = DataSet(tmp_path, [])
    data.document |= change
    with pytest.raises(ConfigError, match=message):
        data.records()
    assert not data.output.parent.exists() or not list(data.output.parent.iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b'{"images": [', b"\xff", b"[" * 100_000])
def test_file_with_invalid_json_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match="must be JSON"):
        list(read_coco(tmp_path / "x.json", tmp_path, Tally()))


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (b'{"messages": [], "images": []}\n{"messages": [], "images": []}\n', "chat messages"),
        (b'[{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}]', "COCO's results"),
        (b'{"shapes": [], "imagePath": "a.png"}', "LabelMe's annotations"),
    ],
)
def test_file_of_another_tool_is_refused_with_its_format(tmp_path, content, form):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"it has the form of {form}"):
        read_coco(tmp_path / "x.json", tmp_path, Tally())


@pytest.mark.parametrize("seed", range(20))
def test_run_length_masks_equal_pycocotools(seed):
    generator = np.random.default_rng(seed)
    mask = generator.random((int(generator.integers(1, 40)), int(generator.integers(1, 40)))) < generator.random()
    encoded = reference.encode(np.asfortranarray(mask.astype(np.uint8)))
    height, width = encoded["size"]
    assert np.array_equal(mask_of_runs(encoded["counts"], height, width), mask)
    assert np.array_equal(mask_of_runs(encoded["counts"].decode(), height, width), mask)


@pytest.mark.parametrize("seed", range(10))
def test_mask_outline_covers_mask(seed):
    generator = np.random.default_rng(seed)
    x, y = np.meshgrid(np.arange(80), np.arange(60))
    centre, size = generator.uniform(20, 40, 2), generator.uniform(8, 18, 2)
    mask = ((x - centre[0]) / size[0]) ** 2 + ((y - centre[1]) / size[1]) ** 2 < 1
    (outline,) = outlines_of_mask(mask).parts
    drawn = reference.decode(reference.frPyObjects([[number for point in outline for number in point]], 60, 80))[..., 0]
    assert (drawn & mask).sum() / (drawn | mask).sum() > 0.93
    assert area(outline) == pytest.approx(mask.sum(), rel=0.05)


@pytest.mark.parametrize(
    ("mask", "parts", "holes"),
    [
        (["#.", ".#"], 1, 0),
        ([".#", "#."], 1, 0),
        (["#.#"], 2, 0),
        (["###", "#.#", "###"], 1, 1),
        ([".#.", "#.#", ".#."], 1, 1),
        (["#####", "#.#.#", "#####"], 1, 2),
        (["#####", "#...#", "#.#.#", "#...#", "#####"], 2, 1),
        (["####", "#..#", "###."], 1, 1),
    ],
)
def test_mask_is_split_into_separate_parts_with_holes_counted(mask, parts, holes):
    found = outlines_of_mask(np.array([[one == "#" for one in row] for row in mask]))
    assert (len(found.parts), found.holes) == (parts, holes)
    points = np.concatenate(found.parts)
    assert np.array_equal(points * 2, np.round(points * 2))


def test_duplicate_ids_and_names_are_counted(tmp_path):
    categories = [{"id": 3, "name": "cat"}, {"id": 18, "name": "cat"}]
    objects = [annotation(1), annotation(2, image="1", category=18)]
    data = DataSet(tmp_path, objects, images=((1, "1.png"), ("1", "2.png")), categories=categories)
    assert [record["sample_id"] for record in data.records()] == ["1", "1"]
    assert data.tally.changed == {record_writer.SAME_ID: 1, annotations.SAME_NAME: 1}
    assert data.tally.names == {record_writer.SAME_ID: ["1"], annotations.SAME_NAME: ["cat"]}


def test_keypoints_are_counted(tmp_path):
    data = DataSet(tmp_path, [annotation(1, keypoints=[10, 10, 2] * 17, num_keypoints=17), annotation(2, keypoints=[])])
    assert len(data.records()[0]["objects"]) == 2
    assert data.tally.changed == {annotations.KEYPOINTS: 1, coco.NO_OBJECT: 1}


def test_holes_are_filled_and_counted(tmp_path):
    mask = np.zeros((200, 100), dtype=np.uint8, order="F")
    mask[20:80, 10:70] = 1
    mask[40:50, 30:40] = 0
    runs = {"size": [200, 100], "counts": reference.encode(mask)["counts"].decode()}
    data = DataSet(tmp_path, [annotation(1, segmentation=runs)])
    (one,) = data.records(geometry="poly")[0]["objects"]
    assert area(list(zip(bins(one)[::2], bins(one)[1::2], strict=True))) == pytest.approx(600 * 300, rel=0.02)
    assert data.tally.changed == {record_writer.HOLES: 1, coco.NO_OBJECT: 1}


def test_mask_larger_than_pixel_limit_is_not_drawn(tmp_path):
    huge = {"size": [10**7, 10**7], "counts": [10**14]}
    data = DataSet(tmp_path, [annotation(1, segmentation=huge), annotation(2)], width=10**7, height=10**7)
    del data.document["images"][0]["width"]  # which is compared otherwise
    assert len(data.records(geometry="poly")[0]["objects"]) == 1
    assert data.tally.objects_left_out == {annotations.BROKEN_OUTLINE: 1}


def test_simplified_outline_stays_within_tolerance():
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    circle = np.stack([100 * np.cos(angles), 100 * np.sin(angles)], axis=1)
    few = simplified(circle, 1.0)
    assert len(few) < 40
    radii = np.hypot(*((few + np.roll(few, 1, axis=0)) / 2).T)
    assert radii.min() > 98.9


def test_import_command_reports_written_and_left_out_objects(tmp_path):
    data = DataSet(tmp_path, [annotation(1), annotation(2, iscrowd=1)])
    data.file.write_text(json.dumps(data.document))
    command = [Path(sys.executable).parent / "stage2", "import", "coco", "--annotations", data.file]
    command += ["--images", data.images, "--output", data.output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert "1 record, 1 object" in done.stdout
    assert f"left out: 1 object: {annotations.CROWD} (annotation 2)" in done.stdout
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert again.returncode == 64
    assert "must be a new file" in again.stderr


def test_two_images_with_same_file_become_one_record_with_objects_of_both(tmp_path):
    found = [
        annotation(1),
        annotation(2, image=2),
        annotation(3, image=2, bbox=(20, 20, 40, 40), segmentation=[SQUARE]),
    ]
    data = DataSet(tmp_path, found, ((1, "1.png"), (2, "1.png"), (3, "3.png")))
    data.document["images"][1] |= {"file_name": "./1.png", "neg_category_ids": [18]}
    first, second = data.records()
    assert [one["sample_id"] for one in (first, second)] == ["1", "3"]
    assert list(map(bins, first["objects"])) == [[100, 50, 600, 300], [200, 100, 600, 300]]
    assert first["metadata"] == {"neg_category_ids": ["dog"]}
    assert data.tally.changed[coco.SAME_FILE] == 1
    assert data.tally.names[coco.SAME_FILE] == ["2 and 1: 1.png"]


@pytest.mark.parametrize(
    ("document", "way_out"),
    [
        ({"images": [], "messages": []}, "use `stage2 import chat FILE"),
        ({"image": "a.png", "prefix": "detect cat", "suffix": ""}, 'write {"images": .PATH.'),
        ([{"image_id": 1, "bbox": [], "score": 1}], "answers are --rollouts of `stage2 evaluate`"),
        ({"image": "a.png"}, "give COCO's instances_"),
    ],
)
def test_file_in_another_format_is_refused_with_advice_for_that_format(tmp_path, document, way_out):
    data = DataSet(tmp_path, [])
    data.document = document
    with pytest.raises(ConfigError, match=rf"--annotations: .*{way_out}"):
        data.records()


@pytest.mark.parametrize(("side", "last", "noted"), [(640, 99, True), (640, 130, False), (150, 99, False)])
def test_boxes_that_may_be_percent_are_noted(tmp_path, side, last, noted):
    Image.new("RGB", (side, side)).save(tmp_path / "a.png")
    found = [annotation(number, bbox=(10, 10, last - 10, number + 20)) for number in range(10)]
    data = DataSet(tmp_path, found, ((1, "../a.png"),), width=side, height=side)
    Image.new("RGB", (side, side)).save(tmp_path / "a.png")
    data.records()
    assert (record_writer.PERCENT in data.tally.changed) is noted
