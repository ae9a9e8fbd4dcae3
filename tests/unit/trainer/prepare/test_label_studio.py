"""`stage2 import labelstudio`: exports of Label Studio, JSON and JSON-MIN, and odd ones."""

import base64
import io
import json
import math

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, label_studio, picture_files, record_writer, shapes
from stage2_trainer.prepare.label_studio import read_label_studio
from tests.unit.trainer.prepare.odd_sets import Imported, picture

BINS = [100, 100, 600, 500]
PLACE = ("cat", BINS)
BOX = {"x": 10, "y": 10, "width": 50, "height": 40}
SIZE = {"original_width": 100, "original_height": 200}
UPLOAD = "/data/upload/3/0a1b2c3d-a.png"


def region(kind="rectanglelabels", labels=("cat",), **value):
    """Return a result of JSON."""
    changed = {key: value.pop(key) for key in ("id", "to_name", "item_index", "image_rotation") if key in value}
    whole = {**(value or BOX), "rotation": value.get("rotation", 0)}
    whole |= {kind: list(labels)} if labels is not None else {}
    return {"id": "r1", "type": kind, "from_name": "label", "to_name": "image", **SIZE, "value": whole} | changed


def task(*results, image=UPLOAD, number=7, **changes):
    annotation = {"id": 1, "completed_by": 1, "was_cancelled": False, "result": [*results]}
    return {"id": number, "data": {"image": image}, "annotations": [annotation], "predictions": []} | changes


def imported(folder, document, images=("a.png",), **choice) -> Imported:
    for name in images:
        picture(folder / "set" / name)
    (folder / "x.json").write_text(document if isinstance(document, str) else json.dumps(document))
    read = lambda tally: read_label_studio(folder / "x.json", folder / "set", tally)  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read, **choice)


def annotation(*results, **changes):
    return {"result": [*results], **changes}


NEAR = {picture_files.RELOCATED: 1}
DOG = region(labels=["dog"])

# The results of one annotation, and the objects and counts that they give.
RESULTS = {
    "a box": ([region()], [PLACE], {}),
    "a polygon": ([region("polygonlabels", points=[[10, 10], [60, 10], [60, 50]])], [PLACE], {}),
    "an ellipse": (
        [region("ellipselabels", x=50, y=50, radiusX=40, radiusY=20)], [("cat", [100, 300, 900, 700])], {}
    ),
    "a box turned by a quarter about its corner": (
        [region(x=60, y=10, width=80, height=25, rotation=90)], [PLACE], {shapes.ROTATED: 1}
    ),
    "a box turned, without the size of the image": (
        [region(), region(id="r2", rotation=30, **BOX) | {"original_width": None}],
        [PLACE],
        {shapes.ROTATED_SHARES: 1},
    ),
    "a turn of text": ([region(), region(id="r2", rotation="30", **BOX)], [PLACE], {annotations.BROKEN_BOX: 1}),
    "an image turned in the editor": (
        [region(), region(id="r2", image_rotation=90)], [PLACE], {label_studio.TURNED_IMAGE: 1}
    ),
    "a brush": (
        [region(), region("brushlabels", id="r2", format="rle", rle=[0, 1])], [PLACE], {label_studio.BRUSH: 1}
    ),
    "a key point": (
        [region(), region("keypointlabels", id="r2", x=5, y=5, width=0.3)], [PLACE], {label_studio.KEYPOINT: 1}
    ),
    "a vector": (
        [region(), region("vectorlabels", id="r2", vertices=[{"x": 1, "y": 2}])],
        [PLACE],
        {label_studio.OTHER_REGION: 1},
    ),
    "a shape and its label apart": (
        [region("rectangle", None), {"id": "r1", "type": "labels", "value": {**BOX, "labels": ["cat"]}}], [PLACE], {}
    ),
    "a choice, a relation and a result without a value": (
        [region(), {"type": "choices", "value": {"choices": ["good"]}}, {"type": "relation"}, {"value": None}],
        [PLACE],
        {label_studio.OTHER_RESULT: 3},
    ),
    "no label": ([region(), region("rectangle", None, id="r2")], [PLACE], {label_studio.NO_LABEL: 1}),
    "two labels": ([region(labels=["cat", "dog"])], [PLACE], {label_studio.SEVERAL_LABELS: 1}),
    "a label in another script": ([region(labels=[" 猫 é "])], [("猫 é", BINS)], {}),
    "a label of half a surrogate pair": (
        [region(), region(id="r2", labels=["\ud800"])], [PLACE], {label_studio.NO_LABEL: 1}
    ),
    "pixels where percent belong": (
        [region(), region(id="r2", x=1024, y=10, width=5000, height=9)], [PLACE], {label_studio.NOT_PERCENT: 1}
    ),
    "a box outside": ([region(x=120, y=10, width=10, height=10)], [], {record_writer.BEYOND: 1}),
    "a box that reaches out": (
        [region(x=-90, y=-80, width=150, height=130)], [("cat", [0, 0, 600, 500])], {record_writer.CLIPPED: 1}
    ),
    "a box without area": ([region(x=10, y=10, width=0, height=40)], [], {record_writer.NO_AREA: 1}),
    "a box that is not numbers": (
        [region(), region(id="r2", x="1", y=None, width=3, height=4)], [PLACE], {annotations.BROKEN_BOX: 1}
    ),
    "a polygon of two points": (
        [region(), region("polygonlabels", id="r2", points=[[1, 2], [3, 4]])], [PLACE], {annotations.BROKEN_OUTLINE: 1}
    ),
    "results that are no mappings": ([region(), 5, None], [PLACE], {}),
    "no size": ([region() | {"original_width": 0, "original_height": None}], [PLACE], {}),
    "the size of another image": ([region() | {"original_width": 7}], [], {record_writer.OTHER_SIZE: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", RESULTS)
def test_label_studio_results_give_expected_objects_and_counts(tmp_path, case):
    results, objects, counts = RESULTS[case]
    found = imported(tmp_path, [task(*results)])
    assert (found.objects, found.counts) == (objects, counts | NEAR)


# A whole task, and what it gives beside the object of the image a.png.
TASKS = {
    "several annotators": (
        task(annotations=[annotation(DOG, updated_at="2024-01-01"), annotation(region(), updated_at="2025-01-01"),
             annotation(DOG, created_at="2023")]),
        True,
        NEAR | {label_studio.SEVERAL_ANNOTATIONS: 1},
    ),
    "ground truth among several": (
        task(annotations=[annotation(region(), ground_truth=True), annotation(DOG, updated_at="2030")]),
        True,
        NEAR | {label_studio.SEVERAL_ANNOTATIONS: 1},
    ),
    "a skipped annotation beside another": (
        task(annotations=[annotation(region()), annotation(DOG, was_cancelled=True)]), True, NEAR
    ),
    "a skipped task": (task(annotations=[annotation(was_cancelled=True)]), False, {label_studio.SKIPPED: 1}),
    "predictions only": (
        task(annotations=[], predictions=[annotation(region())]), False, {label_studio.PREDICTIONS: 1}
    ),
    "no annotation": (task(annotations=[]), False, {label_studio.NOT_ANNOTATED: 1}),
    "annotations by number": (task(annotations=[12]), False, {label_studio.NOT_ANNOTATED: 1}),
    "completions of an old version": (
        {"id": 7, "data": {"image": UPLOAD}, "completions": [annotation(region())]}, True, NEAR
    ),
    "an exact path": (task(region(), image="a.png"), True, {}),
    "an upload with escapes": (
        task(region(), image="/data/upload/3/0a1b2c3d-%E7%8C%AB%20b.png"), True, NEAR, ["猫 b.png"]
    ),
    "an upload whose mark is kept": (task(region()), True, NEAR, ["upload/3/0a1b2c3d-a.png"]),
    "local files": (task(region(), image="/data/local-files/?d=disk%2Fset/sub/a.png"), True, NEAR, ["sub/a.png"]),
    "an address with a query": (
        task(region(), image="https://x.org/p/sub/a.png?sig=a/b.png#c"), True, NEAR, ["sub/a.png"]
    ),
    "a bucket": (task(region(), image="s3://bucket/p/a.png"), True, NEAR),
    "a path of Windows": (task(region(), image="C:\\data\\sub\\a.png"), True, NEAR, ["sub/a.png"]),
    "an image above the folder": (
        task(region(), image="../../x.json.png"), False, {record_writer.MISSING: 1}
    ),
    "a path that is too long": (task(region(), image="x" * 5000 + ".png"), False, {record_writer.MISSING: 1}),
    "no image": (task(region(), image=None), False, {label_studio.NO_IMAGE: 1}),
    "a text beside the image": (
        task(region(), data={"text": "a cat", "img": UPLOAD, "n": 5}), True, NEAR
    ),
    "two images, and regions that name theirs": (
        task(region(to_name="left"), data={"left": UPLOAD, "right": "b.png"}), True, NEAR, ["a.png", "b.png"]
    ),
    "two images, and a region of neither": (
        task(region(), data={"left": UPLOAD, "right": "b.png"}), False, NEAR | {label_studio.WHICH_IMAGE: 1},
        ["a.png", "b.png"],
    ),
    "a list of images": (
        task(region(item_index=1), data={"pages": ["b.png", UPLOAD]}), True, NEAR, ["a.png", "b.png"]
    ),
    "JSON-MIN": ({"image": UPLOAD, "id": 7, "label": [BOX | SIZE | {"rectanglelabels": ["cat"]}]}, True, NEAR),
    "JSON-MIN of a rotated box": (
        {"image": UPLOAD, "id": 7, "label": [
            {"x": 60, "y": 10, "width": 80, "height": 25, "rotation": 90, "rectanglelabels": ["cat"], **SIZE}]},
        True,
        NEAR | {shapes.ROTATED: 1},
    ),
    "JSON-MIN with shapes and labels in two lists": (
        {"image": UPLOAD, "box": [BOX | SIZE], "label": [BOX | SIZE | {"labels": ["cat"]}]}, True, NEAR
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TASKS)
def test_label_studio_task_gives_expected_objects_and_counts(tmp_path, case):
    whole, is_found, counts, *images = TASKS[case]
    found = imported(tmp_path, [whole], *images)
    assert (found.objects, found.counts) == ([PLACE] if is_found else [], counts)


def test_min_export_of_several_annotators_gives_one_record(tmp_path):
    first = {"image": "a.png", "id": 7, "updated_at": "2025", "label": [BOX | SIZE | {"rectanglelabels": ["cat"]}]}
    second = first | {"updated_at": "2024", "label": [BOX | SIZE | {"rectanglelabels": ["dog"]}]}
    found = imported(tmp_path, [first, second])
    assert (found.objects, found.counts) == ([PLACE], {label_studio.SEVERAL_ANNOTATIONS: 1})


def test_empty_annotation_is_an_image_without_objects(tmp_path):
    found = imported(tmp_path, [task(region(), image="a.png"), task(image="b.png", number=8)], ["a.png", "b.png"])
    assert ([len(record["objects"]) for record in found.records], found.counts) == ([1, 0], {})


def test_image_inside_a_task_is_written_beside_the_data_file(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (100, 200)).save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    found = imported(tmp_path, [task(region(), image=url)], [])
    assert (found.objects, found.counts) == ([PLACE], {})
    assert Image.open(found.output.parent / found.records[0]["images"][0]).size == (100, 200)


def test_tasks_with_same_file_name_in_different_folders_do_not_share_image(tmp_path):
    found = imported(tmp_path, [task(region(), image="x/a.png"), task(DOG, image="y/a.png", number=8)])
    assert (found.records, found.counts) == ([], {record_writer.MISSING: 2})


@pytest.mark.parametrize("degrees", [0, 1, 37, 90, 135, 200, 359])
def test_rotated_box_has_corners_shown_by_label_studio(tmp_path, degrees):
    """Label Studio turns a box in pixels, clockwise, about its upper left corner."""
    found = imported(tmp_path, [task(region(x=50, y=50, width=20, height=10, rotation=degrees))], geometry="poly")
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    corners = [(50 + cos * x - sin * y, 100 + sin * x + cos * y) for x, y in ((0, 0), (20, 0), (20, 20), (0, 20))]
    ((_, bins),) = found.objects
    pairs = [*zip(bins[::2], bins[1::2], strict=True)]
    assert len(pairs) == 4
    for x, y in corners:
        assert min(math.dist((x * 10, y * 5), pair) for pair in pairs) < 1.5


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("[", "must be JSON"),
        ("[" * 200_000, "must be JSON"),
        ("{}", "must be a list of tasks, and is a mapping"),
        ("[5]", r"x\.json\[0\]: 5; must be a task"),
    ],
)
def test_file_that_is_no_label_studio_export_is_refused(tmp_path, content, rule):
    with pytest.raises(ConfigError, match=rule):
        imported(tmp_path, content)
