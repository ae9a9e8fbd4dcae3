"""Every import treats a fault by the same rule: one data set, written in the form of each, with one thing wrong."""

import io
import json
import math
import unicodedata
from pathlib import Path

import datasets
import pytest
from PIL import Image

from stage2_trainer.data.files import name_below
from stage2_trainer.data.nearest_file import FilesBelow
from stage2_trainer.prepare import annotations, coco, record_writer, shapes, yolo
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.hugging_face import HubChoice, read_hub
from stage2_trainer.prepare.voc import VocChoice, read_voc
from stage2_trainer.prepare.yolo import read_yolo
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import Imported, picture, voc_object

SIZE = (100, 200)
BOX = (10, 20, 60, 100)  # x1, y1, x2, y2 in pixels
BINS = [100, 100, 600, 500]
CORNERS = [100, 100, 600, 100, 600, 500, 100, 500]


def shares(box):
    return tuple(number / SIZE[i % 2] for i, number in enumerate(box))


class Coco:
    """A COCO file of one image with one object."""

    units = ("pixels", "shares")

    def __init__(self, folder, box=BOX, *, size=SIZE, file="a.png", name="cat", **more):
        picture(folder / "set" / "a.png", SIZE)
        one = {"id": 1, "image_id": 1, "category_id": 1, **more}
        if box is not None:
            one["bbox"] = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        image = {"id": 1, "file_name": file, "width": size[0], "height": size[1]}
        document = {"images": [image], "annotations": [one], "categories": [{"id": 1, "name": name}]}
        (folder / "x.json").write_text(json.dumps(document))
        self.folder = folder

    def read(self, tally, units="pixels", outlines=False):
        return read_coco(self.folder / "x.json", self.folder / "set", tally, outlines=outlines, units=units)


class Yolo:
    """A label file of one line."""

    units = ("shares", "pixels")

    def __init__(self, folder, box=BOX, *, name="cat", file=None, **_):
        in_units = box if max(map(abs, box)) <= 1.5 or math.isnan(sum(box)) else shares(box)
        x1, y1, x2, y2 = in_units
        line = f"0 {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}"
        self.data = odd_sets.yolo(
            folder / "set", {"a.png": line}, names=[name], **({"train": "list.txt"} if file else {})
        )
        if file:
            (folder / "set" / "list.txt").write_text(f"images/train/{file}\n")

    def read(self, tally, units="shares", outlines=False):
        return read_yolo(self.data, "train", tally, units=units)


class YoloPixels(Yolo):
    """A label file in pixels."""

    def __init__(self, folder):
        line = f"0 {(BOX[0] + BOX[2]) / 2} {(BOX[1] + BOX[3]) / 2} {BOX[2] - BOX[0]} {BOX[3] - BOX[1]}"
        self.data = odd_sets.yolo(folder / "set", {"a.png": line})


class Voc:
    """An XML file of one object."""

    units = ("pixels", "shares")

    def __init__(self, folder, box=BOX, *, size=SIZE, file=None, name="cat", **_):
        first = 0 if max(map(abs, box)) <= 1.5 or math.isnan(sum(box)) else 1
        numbers = (box[0] + first, box[1] + first, *box[2:])
        self.folder = odd_sets.voc(folder / "set", {"a": voc_object(name, numbers)}, size=size, file_name=file)
        if file:
            (self.folder / "JPEGImages" / "a.jpg").rename(self.folder / "JPEGImages" / "b.jpg")
            picture(self.folder / "JPEGImages" / "a b" / "é.png")

    def read(self, tally, units="pixels", outlines=False):
        return read_voc(self.folder, VocChoice(units=units), tally)


class Hf:
    """A saved data set of one row."""

    units = ("pixels", "shares")
    boxes = "coco"

    def __init__(self, folder, box=BOX, *, size=SIZE, name="cat", **more):
        encoded = io.BytesIO()
        Image.new("RGB", SIZE).save(encoded, format="PNG")
        x1, y1, x2, y2 = box or (0, 0, 0, 0)
        numbers = {"coco": [x1, y1, x2 - x1, y2 - y1], "voc": [x1, y1, x2, y2]}.get(self.boxes)
        numbers = numbers or [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1]
        objects = {"bbox": [numbers if box else None], "category": [0]} | {key: [one] for key, one in more.items()}
        form = {
            "bbox": datasets.List(datasets.List(datasets.Value("float64"))),
            "category": datasets.List(datasets.ClassLabel(names=[name])),
        }
        if "segmentation" in more:
            form["segmentation"] = datasets.List(datasets.List(datasets.List(datasets.Value("float64"))))
        form |= {key: datasets.List(datasets.Value("float64")) for key in ("rotation", "angle") if key in more}
        whole = datasets.Value("int64")
        features = {"image": datasets.Image(), "objects": form, "width": whole, "height": whole}
        row = {"image": {"bytes": encoded.getvalue(), "path": None}, "objects": objects}
        row |= {"width": size[0], "height": size[1]}
        columns = {key: [one] for key, one in row.items()}
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).save_to_disk(folder / "set")
        self.folder = folder / "set"

    def read(self, tally, units=None, outlines=False):
        return read_hub(str(self.folder), HubChoice(self.boxes, units=units), tally, outlines=outlines)


class HfVoc(Hf):
    """The same with corners."""

    boxes = "voc"


class HfYolo(Hf):
    """The same with centres as shares."""

    units = ("shares", "pixels")
    boxes = "yolo"


def imported(source, folder, units=None, **choice) -> Imported:
    reading = {"outlines": choice.get("geometry") == "poly"} | ({"units": units} if units else {})
    output = folder / f"out-{len(list(folder.iterdir()))}" / "x.jsonl"
    return Imported(output, lambda tally: source.read(tally, **reading), **choice)


ALL = [Coco, Yolo, Voc, Hf, HfVoc]
IN_PIXELS = [Coco, Voc, Hf, HfVoc]
each = pytest.mark.parametrize("form", ALL)
each_in_pixels = pytest.mark.parametrize("form", IN_PIXELS)


@each
def test_valid_dataset_is_imported_without_notes(tmp_path, form):
    found = imported(form(tmp_path), tmp_path)
    assert (found.objects, found.counts) == ([("cat", BINS)], {})


@each_in_pixels
def test_normalized_boxes_read_as_pixels_are_reported_and_units_option_reads_them(tmp_path, form):
    source = form(tmp_path, shares(BOX))
    found = imported(source, tmp_path)
    assert (found.records, found.counts) == ([], {annotations.SHARES: 1})
    assert "--units shares" in annotations.SHARES
    assert imported(source, tmp_path, units="shares").objects == [("cat", BINS)]


@each_in_pixels
@pytest.mark.parametrize("box", [(0.9, 0.9, 1.1, 1.2), (-0.1, 0.2, 0.3, 0.4), (0.2, 0.2, 0.2004, 0.9)])
def test_normalized_boxes_out_of_image_or_thin_are_reported(tmp_path, form, box):
    found = imported(form(tmp_path, box), tmp_path)
    assert (found.records, found.counts) == ([], {annotations.SHARES: 1})


@each_in_pixels
def test_normalized_box_of_whole_image_is_not_read_as_one_pixel(tmp_path, form):
    source = form(tmp_path, (0, 0, 1, 1))
    assert imported(source, tmp_path).records == []
    assert imported(source, tmp_path, units="shares").objects == [("cat", [0, 0, 999, 999])]


@pytest.mark.parametrize("form", [YoloPixels, HfYolo])
def test_pixel_boxes_read_as_normalized_are_reported_and_units_option_reads_them(tmp_path, form):
    source = form(tmp_path)
    found = imported(source, tmp_path)
    assert (found.records, found.counts) == ([], {annotations.NOT_SHARES: 1})
    assert "--units pixels" in annotations.NOT_SHARES
    assert imported(source, tmp_path, units="pixels").objects == [("cat", BINS)]


@each_in_pixels
@pytest.mark.parametrize("box", [BOX, (0, 0, 60, 100), (-5, 20, 60, 100)])
def test_pixel_boxes_are_never_read_as_normalized_whole_image(tmp_path, form, box):
    found = imported(form(tmp_path, box), tmp_path, units="shares")
    assert (found.records, found.counts) == ([], {annotations.NOT_SHARES: 1})


@each_in_pixels
def test_reversed_box_is_left_out_with_likely_cause(tmp_path, form):
    """As x, y, width, height are read as corners, or a width is negative."""
    found = imported(form(tmp_path, (60, 100, 10, 20)), tmp_path)
    assert (found.records, found.counts) == ([], {record_writer.REVERSED: 1})


@each
def test_box_with_nan_is_left_out(tmp_path, form):
    found = imported(form(tmp_path, (math.nan, 20, 60, 100)), tmp_path)
    assert found.records == []
    assert found.counts == {yolo.BROKEN_LINE if form is Yolo else annotations.BROKEN_BOX: 1}


@each_in_pixels
@pytest.mark.parametrize("size", [(0, 0), (-1, -1), (100, 0), (0, 200)])
def test_unknown_image_size_is_taken_from_image(tmp_path, form, size):
    found = imported(form(tmp_path, size=size), tmp_path)
    assert (found.objects, found.counts) == ([("cat", BINS)], {})
    assert (found.records[0]["width"], found.records[0]["height"]) == SIZE


@each
def test_unknown_class_filter_keeps_nothing_and_names_existing_class(tmp_path, form):
    found = imported(form(tmp_path, name="traffic light"), tmp_path, classes=frozenset({"Traffic Light"}))
    assert found.records == []
    assert found.counts == {record_writer.OTHER_CLASS: 1, record_writer.UNSEEN_CLASS: 1}
    assert found.tally.names[record_writer.UNSEEN_CLASS] == ["Traffic Light; there is traffic light"]


POLYGON = [[10.0, 20.0, 60.0, 20.0, 60.0, 100.0, 10.0, 100.0]]


@pytest.mark.parametrize("form", [Coco, Hf, HfVoc])
def test_object_without_box_uses_bounds_of_outline(tmp_path, form):
    source = form(tmp_path, None, segmentation=POLYGON)
    found = imported(source, tmp_path)
    assert (found.objects, found.counts) == ([("cat", BINS)], {shapes.FROM_OUTLINE: 1})
    found = imported(source, tmp_path, geometry="poly")
    assert (found.objects, found.counts) == ([("cat", CORNERS)], {shapes.FROM_OUTLINE: 1})


NO_BOXES = [
    [5, 5, 0, 0], [5, 5, 0, 9], [0, 0, 0, 0], [-1, -1, -1, -1], [math.nan] * 4, [5, 5, math.nan, 9], [None] * 4, "",
    " ", math.nan, {}, [], [5, 5], [30, 40, 50, 80, 0.5],
]  # fmt: skip


@pytest.mark.parametrize("box", NO_BOXES, ids=str)
def test_invalid_coco_box_is_replaced_by_bounds_of_outline(tmp_path, box):
    source = Coco(tmp_path, segmentation=POLYGON)
    document = json.loads((tmp_path / "x.json").read_text())
    document["annotations"][0]["bbox"] = box
    (tmp_path / "x.json").write_text(json.dumps(document))
    for choice, bins in (({}, BINS), ({"geometry": "poly"}, CORNERS)):
        found = imported(source, tmp_path, **choice)
        assert (found.objects, found.counts) == ([("cat", bins)], {shapes.FROM_OUTLINE: 1})
    del document["annotations"][0]["segmentation"]
    (tmp_path / "x.json").write_text(json.dumps(document))
    assert imported(source, tmp_path).objects == []


@pytest.mark.parametrize("box", [(-1, -1, -1, -1), (5, 5, 5, 9), (math.nan, 1, 2, 3)])
def test_invalid_hugging_face_box_is_replaced_by_bounds_of_outline(tmp_path, box):
    found = imported(HfVoc(tmp_path, box, segmentation=POLYGON), tmp_path)
    assert (found.objects, found.counts) == ([("cat", BINS)], {shapes.FROM_OUTLINE: 1})


def test_box_with_negative_size_is_reported_despite_outline(tmp_path):
    found = imported(Coco(tmp_path, (60, 100, 10, 20), segmentation=POLYGON), tmp_path)
    assert found.counts == {record_writer.REVERSED: 1}


@pytest.mark.parametrize("form", [Coco, Hf])
def test_rotated_box_becomes_its_bounds_or_its_outline(tmp_path, form):
    """A box of 80 x 20 pixels about (50, 100), turned by a quarter, is 20 x 80."""
    source = form(tmp_path, (10, 90, 90, 110), rotation=90.0)
    found = imported(source, tmp_path)
    assert (found.objects, found.counts) == ([("cat", [400, 300, 600, 700])], {shapes.ROTATED: 1})
    found = imported(source, tmp_path, geometry="poly")
    assert found.objects == [("cat", [600, 300, 600, 700, 400, 700, 400, 300])]


@pytest.mark.parametrize("form", [Coco, Hf])
def test_rotated_normalized_box_is_left_out(tmp_path, form):
    found = imported(form(tmp_path, shares(BOX), rotation=30.0), tmp_path, units="shares")
    assert (found.records, found.counts) == ([], {shapes.ROTATED_SHARES: 1})


@pytest.mark.parametrize(
    "turn",
    [
        {"rotation": "90"},
        {"attributes": {"rotation": 90.0, "occluded": False}},
        {"attributes": {"rotation": 0.0}, "rotation": 90},
        {"angle": 90},
        {"angle": "-90.0", "attributes": {"angle": None}},
        {"attributes": {"angle": 270}},
        {"rotation": 90, "angle": 1.5707963},
    ],
    ids=str,
)
def test_coco_rotation_is_read_from_attribute_or_key(tmp_path, turn):
    found = imported(Coco(tmp_path, (10, 90, 90, 110), **turn), tmp_path)
    assert (found.objects, found.counts) == ([("cat", [400, 300, 600, 700])], {shapes.ROTATED: 1})


@pytest.mark.parametrize("form", [Coco, Hf])
def test_angle_that_may_be_radians_is_left_out_and_named(tmp_path, form):
    found = imported(form(tmp_path, (10, 90, 90, 110), angle=1.5707963), tmp_path)
    assert (found.records, found.counts) == ([], {shapes.UNCLEAR_ANGLE: 1})


@pytest.mark.parametrize("form", [Coco, Hf])
def test_angle_in_degrees_rotates_box_like_rotation(tmp_path, form):
    source = form(tmp_path, (10, 90, 90, 110), angle=90.0)
    found = imported(source, tmp_path)
    assert (found.objects, found.counts) == ([("cat", [400, 300, 600, 700])], {shapes.ROTATED: 1})
    assert imported(source, tmp_path, geometry="poly").objects == [("cat", [600, 300, 600, 700, 400, 700, 400, 300])]


@pytest.mark.parametrize(
    "turn",
    [
        {"angle": 0},
        {"angle": 180.0},
        {"rotation": 0},
        {"rotation": 180},
        {"rotation": None},
        {"rotation": "left"},
        {"rotation": [1]},
        {"attributes": {"rotation": 0.0}},
        {"attributes": []},
        {"attributes": {"rotation": float("inf")}},
    ],
)
def test_box_without_effective_rotation_is_unchanged(tmp_path, turn):
    found = imported(Coco(tmp_path, **turn), tmp_path)
    assert (found.objects, found.counts) == ([("cat", BINS)], {})


def test_rotation_is_clockwise_as_cvat_shows_it(tmp_path):
    """The left end of a flat box goes up."""
    found = imported(Coco(tmp_path, (10, 90, 90, 110), rotation=30.0), tmp_path, geometry="poly")
    ((_, bins),) = found.objects
    points = sorted(zip(bins[::2], bins[1::2], strict=True))
    assert points[0][1] < 500 < points[-1][1]


NAMES = {
    "backslash": ("sub\\a.png", "sub/a.png", "its name differs in backslashes"),
    "two backslashes": ("x\\y\\a.png", "x/y/a.png", "its name differs in backslashes"),
    "percent": ("my%20a.png", "my a.png", "its name differs in percent signs"),
    "NFD": (unicodedata.normalize("NFD", "é.png"), "é.png", "its name differs in the form of its Unicode (NFC or NFD)"),
    "NFC": ("é.png", unicodedata.normalize("NFD", "é.png"), "its name differs in the form of its Unicode (NFC or NFD)"),
    "percent of NFD": (
        "e%CC%81.png",
        "é.png",
        "its name differs in percent signs, the form of its Unicode (NFC or NFD)",
    ),
    "case": ("A.PNG", "a.png", "its name differs in upper and lower case"),
    "case of the folder": ("Sub/a.png", "sub/a.png", "its name differs in upper and lower case"),
    "backslash and case": ("Sub\\A.png", "sub/a.png", "its name differs in backslashes, upper and lower case"),
    "a drive": ("C:\\data\\a.png", "sub/a.png", "it is in another folder"),
    "an address": (
        "https://host.example/set/a.png?size=1",
        "sub/a.png",
        "it is in another folder, and differs in percent signs",
    ),
    "a folder more": ("train/a.png", "a.png", "it is in another folder"),
    "another folder and case": (
        "train/A.png",
        "x/a.png",
        "it is in another folder, and differs in upper and lower case",
    ),
    "ending": ("a.jpeg", "a.png", "its ending differs"),
    "one letter": ("photograph-17.png", "photograph_17.png", "its name is similar"),
}


@pytest.mark.parametrize("case", NAMES)
def test_missing_image_is_reported_with_most_similar_file(tmp_path, case):
    wanted, there, differs = NAMES[case]
    source = Coco(tmp_path, file=wanted)
    picture(tmp_path / "set" / "zzz.bmp")
    (tmp_path / "set" / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "set" / "a.png").rename(tmp_path / "set" / there)
    found = imported(source, tmp_path)
    ((path, root),) = found.tally.missing.items()
    assert found.tally.names[record_writer.MISSING] == [name_below(path, root)]
    assert FilesBelow(root).nearest(path) == (tmp_path / "set" / there, differs)


def test_dissimilar_file_names_are_not_suggested(tmp_path):
    picture(tmp_path / "a.png")
    assert FilesBelow(tmp_path).nearest(tmp_path / "photograph.bmp") is None
    assert FilesBelow(tmp_path / "lost").nearest(tmp_path / "lost" / "a.png") is None


@pytest.mark.parametrize(("form", "name"), [(Coco, "x/a.png"), (Yolo, "x\\a.png"), (Voc, "a%20b/é.png")])
def test_every_import_reports_missing_image_by_relative_path(tmp_path, form, name):
    found = imported(form(tmp_path, file=name), tmp_path)
    ((path, root),) = found.tally.missing.items()
    assert path.as_posix().endswith(name)
    assert FilesBelow(root).nearest(path) is not None
    (named,) = found.tally.names[record_writer.MISSING]
    assert named.endswith(name)
    assert not Path(named).is_absolute()


NAMED_TWICE = ((2, "lost.png"), (3, "./lost.png"), (4, "lost.png"), (5, "gone.png"))


def test_missing_image_of_several_entries_is_counted_once(tmp_path):
    source = Coco(tmp_path)
    document = json.loads((tmp_path / "x.json").read_text())
    document["images"] += [{"id": number, "file_name": name} for number, name in NAMED_TWICE]
    (tmp_path / "x.json").write_text(json.dumps(document))
    found = imported(source, tmp_path)
    assert found.counts == {record_writer.MISSING: 2, coco.SAME_FILE: 2}
    assert found.tally.names[record_writer.MISSING] == ["lost.png", "gone.png"]
    assert list(found.tally.missing) == [tmp_path / "set" / "lost.png", tmp_path / "set" / "gone.png"]
