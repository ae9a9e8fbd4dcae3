"""Data sets of Hugging Face become records: from a folder on disk, images inside it or beside it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data.images import load_image
from stage2_trainer.data.records import load_records
from stage2_trainer.prepare import annotations, hugging_face, record_writer
from stage2_trainer.prepare.hugging_face import HubChoice, read_hub
from tests.unit.trainer.prepare.odd_sets import Imported, picture, unreadable

LABELS = datasets.ClassLabel(names=["cat", "dog"])
BINS = [100, 100, 600, 350]


def encoded(size=(100, 200), form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, format=form)
    return {"bytes": file.getvalue(), "path": None}


def features(category=LABELS, **more):
    one = {"bbox": datasets.List(datasets.Value("float64")), "category": category}
    listed = {key: datasets.List(kind) for key, kind in one.items()}
    return datasets.Features({"image": datasets.Image(), "objects": listed, **more})


def row(boxes=((10, 20, 50, 50),), categories=(0,), image=None, **more):
    objects = {"bbox": [list(box) for box in boxes], "category": list(categories)}
    return {"image": image or encoded(), "objects": objects, **more}


def saved(folder: Path, *rows, form=None) -> Path:
    columns = {key: [one[key] for one in rows] for key in rows[0]}
    datasets.Dataset.from_dict(columns, features=form or features()).save_to_disk(folder / "set")
    return folder / "set"


def imported(folder, source, what=None, **choice):
    what = what or HubChoice("coco")
    read = lambda tally: read_hub(str(source), what, tally, outlines=choice.get("geometry") == "poly")  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read, **choice)


def test_embedded_images_are_written_as_files_beside_records(tmp_path):
    source = saved(tmp_path, row(), row(image=encoded(form="JPEG")))
    found = imported(tmp_path, source)
    assert [record["images"] for record in found.records] == [["x-images/00000000.png"], ["x-images/00000001.jpg"]]
    assert found.objects == [("cat", BINS)] * 2
    for record in load_records(found.output):
        assert load_image(record.images[0]).size == (100, 200)
    assert sorted(path.name for path in found.output.parent.iterdir()) == ["x-images", "x.jsonl"]


def test_images_of_records_that_are_left_out_are_not_written(tmp_path):
    source = saved(tmp_path, row(), row([(1, 1, 9, 9)] * 2, (0, 1)), row(), row())
    found = imported(tmp_path, source, max_objects=1, limit=2)
    assert [record["sample_id"] for record in found.records] == ["0", "2"]
    assert len(list((found.output.parent / "x-images").iterdir())) == 2


def test_images_stored_as_files_are_not_copied(tmp_path):
    path = picture(tmp_path / "there" / "a.jpg")
    rows = datasets.Dataset.from_dict({"image": [str(path)], "objects": [row()["objects"]]}, features=features())
    rows.cast_column("image", datasets.Image(decode=False)).save_to_disk(tmp_path / "set")
    found = imported(tmp_path, tmp_path / "set")
    assert len(found.records) == 1
    assert load_image(load_records(found.output)[0].images[0]).size == (100, 200)


@pytest.mark.parametrize(
    ("boxes", "box"), [("coco", (10, 20, 50, 50)), ("voc", (10, 20, 60, 70)), ("yolo", (0.35, 0.225, 0.5, 0.25))]
)
def test_boxes_option_selects_box_format(tmp_path, boxes, box):
    assert imported(tmp_path, saved(tmp_path, row([box])), HubChoice(boxes)).objects == [("cat", BINS)]


@pytest.mark.parametrize(
    ("kind", "category", "names", "desc"),
    [
        (datasets.Value("string"), "bird", (), "bird"),
        (datasets.Value("large_string"), "bird", (), "bird"),
        (datasets.Value("float64"), 1.0, ("a", "b"), "b"),
        (datasets.Value("int64"), 1, ("a", "b"), "b"),
        (LABELS, 1, (), "dog"),
        (LABELS, 1, ("a", "b"), "b"),
    ],
)
def test_category_may_be_text_or_number_with_name(tmp_path, kind, category, names, desc):
    source = saved(tmp_path, row(categories=[category]), form=features(kind))
    assert imported(tmp_path, source, HubChoice("coco", names=names)).objects == [(desc, BINS)]


def test_duplicate_category_name_is_counted(tmp_path):
    source = saved(tmp_path, row([(10, 20, 50, 50)], (1,)), form=features(datasets.Value("int64")))
    found = imported(tmp_path, source, HubChoice("coco", names=("cat", "cat ", "dog")))
    assert (found.objects, found.counts) == ([("cat", BINS)], {annotations.SAME_NAME: 1})


@pytest.mark.parametrize("names", [("cat", " ", "dog"), ("", "cat")])
def test_blank_category_name_is_refused(tmp_path, names):
    numbered = saved(tmp_path / "numbers", row(), form=features(datasets.Value("int64")))
    with pytest.raises(ConfigError, match=r"--names: .*must be non-blank names"):
        imported(tmp_path, numbered, HubChoice("coco", names=names))
    labelled = saved(tmp_path / "labels", row(), form=features(datasets.ClassLabel(names=list(names))))
    with pytest.raises(ConfigError, match=r"objects\.category names: .*must be non-blank names"):
        imported(tmp_path, labelled)


def test_objects_may_be_list_of_mappings(tmp_path):
    one = {"box": datasets.List(datasets.Value("float64")), "label": LABELS, "iscrowd": datasets.Value("bool")}
    form = datasets.Features({"picture": datasets.Image(), "faces": datasets.List(one)})
    faces = [{"box": [10, 20, 50, 50], "label": 1, "iscrowd": crowd} for crowd in (False, True)]
    found = imported(tmp_path, saved(tmp_path, {"picture": encoded(), "faces": faces}, form=form))
    assert (found.objects, found.counts) == ([("dog", BINS)], {annotations.CROWD: 1})


def test_outlines_sizes_and_ids_are_read_if_present(tmp_path):
    polygon = datasets.List(datasets.List(datasets.Value("float64")))
    whole = features(image_id=datasets.Value("int64"), width=datasets.Value("int64"), height=datasets.Value("int64"))
    whole["objects"]["segmentation"] = datasets.List(polygon)
    one = row(image_id=7, width=100, height=200)
    one["objects"]["segmentation"] = [[[10, 20, 60, 20, 60, 70]]]
    other = {**one, "image_id": 8, "width": 99}
    found = imported(tmp_path, saved(tmp_path, one, other, form=whole), geometry="poly")
    assert found.objects == [("cat", [100, 100, 600, 100, 600, 350])]
    assert [record["sample_id"] for record in found.records] == ["7"]
    assert found.counts == {record_writer.OTHER_SIZE: 1}


OBJECTS = {
    "three numbers": (row([(1, 2, 3)]), {annotations.BROKEN_BOX: 1}),
    "no class": (row(categories=[None]), {annotations.NO_CATEGORY: 1}),
    "no area": (row([(1, 2, 0, 5)]), {record_writer.NO_AREA: 1}),
    "voc for coco": (row([(40, 100, 90, 190)]), {record_writer.CLIPPED: 1}),
    "uneven lists": (row(categories=[0, 1]), {hugging_face.UNEVEN: 1}),
    "a category between two": (row(categories=[0.5]), {annotations.NO_CATEGORY: 1}),
    "no objects at all": ({**row(), "objects": None}, {hugging_face.UNEVEN: 1}),
    "no list of boxes": ({**row(), "objects": {"bbox": None, "category": [0]}}, {hugging_face.UNEVEN: 1}),
    "no image": ({**row(), "image": None}, {hugging_face.NO_IMAGE: 1}),
    "a broken image": (row(image={"bytes": b"none", "path": None}), {unreadable("it is text, no image"): 1}),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_odd_objects_are_left_out_or_repaired_and_counted(tmp_path, case):
    odd, counts = OBJECTS[case]
    kind = datasets.Value("float64") if case == "a category between two" else LABELS
    found = imported(
        tmp_path, saved(tmp_path, odd, row(), form=features(kind)), HubChoice("coco", names=("cat", "dog"))
    )
    assert found.counts == counts


def test_row_with_null_object_is_left_out_and_counted(tmp_path):
    one = {"box": datasets.List(datasets.Value("float64")), "label": LABELS}
    form = datasets.Features({"picture": datasets.Image(), "faces": datasets.List(one)})
    faces = {"picture": encoded(), "faces": [{"box": [10, 20, 50, 50], "label": 1}, None]}
    found = imported(tmp_path, saved(tmp_path, faces, {**faces, "faces": faces["faces"][:1]}, form=form))
    assert (len(found.records), found.counts) == (1, {hugging_face.UNEVEN: 1})


@pytest.mark.parametrize("form", [{"type": "numpy"}, {"type": "arrow"}, {"type": None, "columns": ["image"]}])
def test_saved_dataset_format_does_not_change_import(tmp_path, form):
    columns = {key: [one] for key, one in row().items()}
    datasets.Dataset.from_dict(columns, features=features()).with_format(**form).save_to_disk(tmp_path / "set")
    found = imported(tmp_path, tmp_path / "set")
    assert (found.objects, found.counts) == ([("cat", BINS)], {})


def test_names_option_for_text_categories_is_refused(tmp_path):
    source = saved(tmp_path, row(categories=["0"]), form=features(datasets.Value("string")))
    with pytest.raises(ConfigError, match=r"--names: .*names numbers, and objects\.category holds texts"):
        imported(tmp_path, source, HubChoice("coco", names=("cat", "dog")))


def test_unreadable_row_is_reported(tmp_path):
    source = saved(tmp_path, row(categories=["a long name"]), form=features(datasets.Value("string")))
    (file,) = source.glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"a long name", b"a l\xff\xfeg name"))
    with pytest.raises(ConfigError, match=r"NAME_OR_DIR: .*row 0, .*codec can't decode byte"):
        imported(tmp_path, source)
    assert not list((tmp_path / "out").iterdir())


def test_single_object_without_list_is_left_out_and_counted(tmp_path):
    form = features()
    form["objects"] = {"bbox": datasets.List(datasets.Value("float32")), "category": LABELS}
    one = {**row(), "objects": {"bbox": [1, 2, 3, 4], "category": 0}}
    assert imported(tmp_path, saved(tmp_path, one, form=form)).counts == {hugging_face.UNEVEN: 1}


def test_image_column_without_images_is_refused(tmp_path):
    source = saved(tmp_path, {**row(), "year": 5}, form=features(year=datasets.Value("int64")))
    with pytest.raises(ConfigError, match=r"--image: 'year'; must be a column of images"):
        imported(tmp_path, source, HubChoice("coco", image="year"))


def test_dataset_with_several_splits_needs_split_option(tmp_path):
    one = datasets.Dataset.from_dict({key: [value] for key, value in row().items()}, features=features())
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "set")
    with pytest.raises(ConfigError, match=r"--split: .*has train, test"):
        imported(tmp_path, tmp_path / "set")
    assert len(imported(tmp_path, tmp_path / "set", HubChoice("coco", "test")).records) == 1


@pytest.mark.parametrize(
    ("what", "form", "message"),
    [
        (HubChoice("coco", image="objects2"), features(), "--image"),
        (HubChoice("coco", objects="image"), features(), "--objects: .* there are image, objects"),
        (HubChoice("coco"), features(datasets.Value("int64")), "--names: .*nothing names them"),
        (HubChoice("coco", split="train"), features(), "--split: 'train'; .* has no splits"),
    ],
)
def test_missing_column_is_reported_with_existing_columns(tmp_path, what, form, message):
    with pytest.raises(ConfigError, match=message):
        imported(tmp_path, saved(tmp_path, row(), form=form), what)
    assert not (tmp_path / "out").exists()


def test_unknown_dataset_name_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"NAME_OR_DIR: .*must be a folder of save_to_disk, or the name"):
        imported(tmp_path, tmp_path / "lost")


def test_interrupted_import_leaves_no_files(tmp_path):
    def broken(tally):
        found = read_hub(str(saved(tmp_path, row(), row())), HubChoice("coco"), tally)
        yield next(iter(found))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Imported(tmp_path / "out" / "x.jsonl", broken)
    assert list((tmp_path / "out").iterdir()) == []


def test_import_command_asks_for_missing_boxes_option(tmp_path):
    source, output = saved(tmp_path, row()), tmp_path / "x.jsonl"
    command = [str(Path(sys.executable).parent / "stage2"), "import", "hf", str(source), "--output", str(output)]
    undeclared = subprocess.run(command, capture_output=True, text=True, check=False)
    assert undeclared.returncode != 0
    assert "--boxes" in undeclared.stderr
    named = [*command, "--boxes", "coco", "--names", "a,,b"]
    blank = subprocess.run(named, capture_output=True, text=True, check=False)
    assert (blank.returncode, "--names" in blank.stderr) == (64, True)
    done = subprocess.run([*command, "--boxes", "coco"], capture_output=True, text=True, check=True)
    assert "1 record, 1 object" in done.stdout
    assert json.loads(output.read_text())["images"] == ["x-images/00000000.png"]
