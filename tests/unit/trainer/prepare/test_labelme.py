"""`stage2 import labelme`: folders as LabelMe and X-AnyLabeling write them, and odd ones."""

import base64
import io
import json
import os

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, labelme, picture_files, record_writer, shapes
from stage2_trainer.prepare.labelme import read_labelme
from tests.unit.trainer.prepare.odd_sets import Imported, picture, unreadable

PLACE = ("cat", [100, 100, 600, 500])


def shape(points=((10, 20), (60, 100)), kind="rectangle", label="cat", **more):
    return {"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}, **more}


def document(*found, **changes):
    whole = {"version": "5.5.0", "flags": {}, "shapes": [*found], "imagePath": "a.png", "imageData": None}
    return whole | {"imageHeight": 200, "imageWidth": 100} | changes


def imported(folder, *documents, images=("a.png",), **choice) -> Imported:
    """Write a folder of annotation files a.json, b.json, and import it. A document may be text."""
    source = folder / "set"
    source.mkdir()
    for name in images:
        picture(source / name)
    for name, one in zip("abc", documents, strict=False):
        (source / f"{name}.json").write_text(one if isinstance(one, str) else json.dumps(one))
    return Imported(folder / "out" / "x.jsonl", lambda tally: read_labelme(source, tally), **choice)


def encoded():
    file = io.BytesIO()
    Image.new("RGB", (100, 200)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


TRIANGLE = [[10, 20], [60, 20], [60, 100]]

# Shapes of one image, and the objects and counts that they give.
SHAPES = {
    "a rectangle": ([shape()], [PLACE], {}),
    "a rectangle from its last corner": ([shape([[60, 100], [10, 20]])], [PLACE], {}),
    "a rectangle of four corners": ([shape([[10, 20], [60, 20], [60, 100], [10, 100]])], [PLACE], {}),
    "a polygon": ([shape(TRIANGLE, "polygon")], [PLACE], {}),
    "a polygon of an old version, without a type": ([shape(TRIANGLE, None)], [PLACE], {}),
    "a circle": ([shape([[50, 100], [50, 140]], "circle")], [("cat", [100, 300, 900, 700])], {}),
    "a rotated box": (
        [shape([[35, 20], [60, 60], [35, 100], [10, 60]], "rotation", direction=0.7)],
        [PLACE],
        {shapes.ROTATED: 1},
    ),
    "a mask": ([shape([[10, 20], [59, 99]], "mask", mask="AAAA")], [PLACE], {labelme.MASK: 1}),
    "a line, a point and points": (
        [shape(), *(shape([[1, 2]], kind) for kind in ("line", "linestrip", "point", "points"))],
        [PLACE],
        {labelme.NO_OUTLINE: 4},
    ),
    "a shape of the future": ([shape(), shape(kind="spline")], [PLACE], {labelme.OTHER_SHAPE: 1}),
    "a shape that is a list": ([shape(), [1]], [PLACE], {labelme.OTHER_SHAPE: 1}),
    "two parts of a group": (
        [shape([[10, 20], [20, 20], [20, 30]], "polygon", group_id=1), shape([[50, 90], [60, 90], [60, 100]], "polygon",
         group_id=1)],
        [PLACE],
        {},
    ),
    "a group of two labels": (
        [shape(group_id=1), shape(group_id=1, label="dog")],
        [PLACE, ("dog", PLACE[1])],
        {},
    ),
    "a blank label and none": ([shape(), shape(label=" "), shape(label=None)], [PLACE], {labelme.NO_LABEL: 2}),
    "a label in another script": ([shape(label=" 猫 é ")], [("猫 é", PLACE[1])], {}),
    "a box outside": ([shape([[200, 20], [260, 100]])], [], {record_writer.BEYOND: 1}),
    "a box that reaches out": (
        [shape([[-90, -80], [60, 100]])], [("cat", [0, 0, 600, 500])], {record_writer.CLIPPED: 1}
    ),
    "a box without area": ([shape([[10, 20], [10, 100]])], [], {record_writer.NO_AREA: 1}),
    "normalized coordinates": ([shape([[0.1, 0.1], [0.6, 0.5]])], [], {annotations.SHARES: 1}),
    "points of text, of three numbers, of no end, and none": (
        [shape(), shape([["1", 2], [3, 4]]), shape([[1, 2, 3]] * 2), shape([[1, 2], [float("inf"), 4]]), shape([])],
        [PLACE],
        {annotations.BROKEN_OUTLINE: 4},
    ),
    "a polygon of two points": (
        [shape(), shape([[1, 2], [3, 4]], "polygon")], [PLACE], {annotations.BROKEN_OUTLINE: 1}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_labelme_shapes_give_expected_objects_and_counts(tmp_path, case):
    found, objects, counts = SHAPES[case]
    result = imported(tmp_path, document(*found))
    assert (result.objects, result.counts) == (objects, counts)


# A whole annotation file, the images beside it, and what is counted; the object is found where `found` is true.
FILES = {
    "no sizes": (document(shape(), imageHeight=None, imageWidth=0), ["a.png"], True, {}),
    "sizes of another image": (document(shape(), imageHeight=7), ["a.png"], False, {record_writer.OTHER_SIZE: 1}),
    "a path of Windows": (document(shape(), imagePath="..\\set\\a.png"), ["a.png"], True, {}),
    "a path of Windows from its root": (
        document(shape(), imagePath="C:\\Users\\me\\sub\\b.png"),
        ["sub/b.png"],
        True,
        {picture_files.RELOCATED: 1},
    ),
    "a name that was changed": (
        document(shape(), imagePath="IMG_1.jpg"), ["a.png"], True, {labelme.OWN_NAME: 1}
    ),
    "a path in another script": (document(shape(), imagePath="é ü/猫.png"), ["é ü/猫.png"], True, {}),
    "no path": (document(shape(), imagePath=None), ["a.png"], True, {labelme.OWN_NAME: 1}),
    "no path and no image": (document(shape(), imagePath=None), [], False, {record_writer.MISSING: 1}),
    "an image that is nowhere": (document(shape(), imagePath="x.png"), [], False, {record_writer.MISSING: 1}),
    "an image above the folder": (document(shape(), imagePath="../../../../etc/hostname"), [], False, None),
    "imageData that is no image": (
        document(shape(), imagePath="x.png", imageData="aGVsbG8="),
        [],
        False,
        {labelme.INSIDE: 1, unreadable("it is text, no image"): 1},
    ),
    "imageData that is no base64": (
        document(shape(), imagePath="x.png", imageData="A"), [], False,
        {labelme.INSIDE: 1, picture_files.NOT_BASE64: 1},
    ),
    "cut off": (json.dumps(document(shape()))[:-3], ["a.png"], False, {labelme.BROKEN_FILE: 1}),
    "nested deeply": ("[" * 200_000, ["a.png"], False, {labelme.BROKEN_FILE: 1}),
    "a file of COCO": ('{"images": [], "annotations": []}', ["a.png"], False, {labelme.OTHER_FILE: 1}),
    "a number": ("5", ["a.png"], False, {labelme.OTHER_FILE: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_labelme_file_gives_expected_objects_and_counts(tmp_path, case):
    content, images, found, counts = FILES[case]
    result = imported(tmp_path, content, images=images)
    assert result.objects == ([PLACE] if found else [])
    if counts is not None:
        assert result.counts == counts


def test_image_inside_its_file_is_written_beside_the_data_file(tmp_path):
    result = imported(tmp_path, document(shape(), imageData=encoded()), images=[])
    assert (result.objects, result.counts) == ([PLACE], {labelme.INSIDE: 1})
    (record,) = result.records
    assert Image.open(result.output.parent / record["images"][0]).size == (100, 200)


def test_file_without_shapes_is_an_image_without_objects(tmp_path):
    result = imported(tmp_path, document(shape()), document(imagePath="b.png"), images=["a.png", "b.png"])
    assert ([len(record["objects"]) for record in result.records], result.counts) == ([1, 0], {})


def test_images_without_annotation_file_or_with_several_are_counted(tmp_path):
    result = imported(tmp_path, document(shape()), document(shape()), images=["a.png", "z.png"])
    assert [record["sample_id"] for record in result.records] == ["a", "b"]
    assert result.counts == {labelme.NO_ANNOTATION: 1, labelme.SEVERAL_FILES: 1}


def test_poly_geometry_writes_outlines(tmp_path):
    result = imported(tmp_path, document(shape(TRIANGLE, "polygon"), shape()), geometry="poly")
    assert [len(bins) for _, bins in result.objects] == [6, 8]


def test_pipe_and_large_file_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(labelme, "LARGEST_FILE", 1000)
    source = tmp_path / "set"
    source.mkdir()
    os.mkfifo(source / "c.json")
    (source / "d.json").write_text(json.dumps(document(*[shape()] * 20)))
    picture(source / "a.png")
    (source / "e.json").write_text(json.dumps(document(shape())))
    result = Imported(tmp_path / "out" / "x.jsonl", lambda tally: read_labelme(source, tally))
    assert (result.objects, result.counts) == ([PLACE], {labelme.BROKEN_FILE: 2})


def test_too_many_shapes_and_points_are_left_out(tmp_path):
    many = document(*[1] * (labelme.MOST_SHAPES + 1))
    long = document(shape([[1, 2]] * (labelme.MOST_POINTS + 1), "polygon"), shape())
    result = imported(tmp_path, many, long)
    assert (result.objects, result.counts) == ([PLACE], {labelme.TOO_MANY: 1, annotations.BROKEN_OUTLINE: 1})


def test_folder_without_files_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"FOLDER.*must have annotation files \(\*\.json\)"):
        imported(tmp_path)
