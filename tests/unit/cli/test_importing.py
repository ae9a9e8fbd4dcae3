"""`stage2 import`: the summary of what it wrote, left out and changed."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from stage2_cli.data import show_data
from stage2_cli.requests import DataRequest
from stage2_trainer.prepare import record_writer, voc, yolo
from stage2_trainer.prepare.annotations import NO_CATEGORY, NOT_SHARES
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import voc_object

pytestmark = pytest.mark.in_turns(3, apart=True)

BOX = "0 0.5 0.25 0.2 0.1"


def stage2(*words: object) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "stage2"), "import", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_yolo_import_summarizes_kept_and_left_out_objects(tmp_path: Path) -> None:
    labels = {"a.png": "0 0.5 0.25 0.2 0.1\n1 0.5 0.5 0.1 0.1\n0 1 2", "b.png": None, "c.png": "1 0.5 0.5 0.1 0.1"}
    data, output = odd_sets.yolo(tmp_path, labels), tmp_path / "x.jsonl"
    done = stage2("yolo", data, "--output", output, "--classes", "cat,horse", "--limit", 2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{output}: 2 records, 1 object",
        f"  left out: 1 object: {yolo.BROKEN_LINE} (images/train/a: 0 1 2)",
        f"  left out: 1 object: {record_writer.OTHER_CLASS} (images/train/a dog)",
        f"  noted 1 time: {yolo.BACKGROUND} (images/train/b: no labels/train/b.txt)",
        f"  noted 1 time: {record_writer.UNSEEN_CLASS} (horse; there is cat, dog)",
    ]
    assert [len(json.loads(line)["objects"]) for line in output.read_text().splitlines()] == [1, 0]


@pytest.mark.parametrize("classes", ["", " , "])
def test_empty_classes_option_is_refused(tmp_path: Path, classes: str) -> None:
    """They kept all."""
    done = stage2("yolo", tmp_path, "--output", tmp_path / "x.jsonl", "--classes", classes)
    assert (done.returncode, "must name a category" in done.stderr) == (64, True)


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    source, output = odd_sets.yolo(tmp_path, {"a.png": f"0 1 \x1b[31mred\n{BOX}"}), tmp_path / "x.jsonl"
    done = stage2("yolo", source, "--output", output)
    assert (done.returncode, "\x1b" in done.stdout) == (0, False)
    assert "0 1 \\x1b[31mred" in done.stdout


def test_names_with_markup_are_printed_literally(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich makes a picture of `:cat:`, and takes `[bold]` away."""
    data = odd_sets.yolo(tmp_path / ":cat: [bold]", {"a.png": f"9 0.5 0.5 0.2 0.2 :dog: [red]\n{BOX}"})
    output = tmp_path / ":bird: [i]" / "x.jsonl"
    output_text = stage2("yolo", data, "--output", output).stdout
    assert output_text.startswith(f"{output}: 1 record, 1 object")
    assert ":dog: [red]" in output_text
    show_data(DataRequest(output))
    assert f"{output}: 1 record, 1 object" in capsys.readouterr().out


def test_voc_import_summarizes_kept_and_left_out_objects(tmp_path: Path) -> None:
    objects = voc_object("cat", (11, 21, 60, 100)) + voc_object("dog", (1, 1, 9, 9), difficult=1)
    source, output = odd_sets.voc(tmp_path / "voc", {"a": objects}), tmp_path / "x.jsonl"
    done = stage2("voc", source, "--output", output, "--geometry", "poly")
    assert f"left out: 1 object: {voc.DIFFICULT} (a dog)" in done.stdout
    (record,) = map(json.loads, output.read_text().splitlines())
    assert [len(one["poly"]) for one in record["objects"]] == [8]
    output.unlink()
    kept = stage2("voc", source, "--output", output, "--difficult", "--order", "file")
    assert "1 record, 2 objects" in kept.stdout


def test_import_that_finds_no_image_reports_where_it_looked(tmp_path: Path) -> None:
    odd_sets.picture(tmp_path / "images" / "train" / "000017.png")
    image = {"id": 17, "file_name": "000017.png", "width": 100, "height": 200}
    document = {"images": [image], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "x.json").write_text(json.dumps(document))
    output = tmp_path / "out.jsonl"
    done = stage2("coco", "--annotations", tmp_path / "x.json", "--images", tmp_path / "images", "--output", output)
    assert (done.returncode, output.exists()) == (65, False)
    assert (
        f"looked for {tmp_path}/images/000017.png; there is {tmp_path}/images/train/000017.png: it is in another folder"
        in done.stderr
    )


def coco_file(folder: Path, annotations: list[dict[str, Any]]) -> list[object]:
    odd_sets.picture(folder / "images" / "a.png")
    document = {
        "images": [{"id": 1, "file_name": "a.png", "width": 100, "height": 200}],
        "annotations": [{"id": number, "category_id": 1, **one} for number, one in enumerate(annotations)],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (folder / "x.json").write_text(json.dumps(document))
    return ["coco", "--annotations", folder / "x.json", "--images", folder / "images"]


def test_import_without_objects_exits_65_with_commonest_reasons(tmp_path: Path) -> None:
    box = {"bbox": [1, 2, 3, 4]}
    others = (
        [{"image_id": 9, **box}] * 5 + [{"image_id": 1, "bbox": [1]}] * 3 + [{"image_id": 1, "bbox": [1, 2, 3, 0]}] * 2
    )
    output = tmp_path / "out.jsonl"
    done = stage2(*coco_file(tmp_path, [*others, {"image_id": 1, "iscrowd": 1, **box}]), "--output", output)
    assert (done.returncode, done.stdout, output.exists()) == (65, "", False)
    assert done.stderr.splitlines() == [
        f"no object was kept, and {output} was not written; the commonest reasons:",
        "  left out: 5 objects: its image is not in the file "
        "(annotation 0: image_id: 9, annotation 1: image_id: 9, annotation 2: image_id: 9, …)",
        "  left out: 3 objects: its box is not four numbers (annotation 5: [1], annotation 6: [1], annotation 7: [1])",
        "  left out: 2 objects: it has no area (1 cat: 1, 2, 4, 2)",
    ]


def test_import_of_images_without_annotations_exits_65(tmp_path: Path) -> None:
    done = stage2(*coco_file(tmp_path, []), "--output", tmp_path / "out.jsonl")
    assert done.returncode == 65
    assert "1 image without an object in the annotations" in done.stderr


def test_import_that_keeps_no_object_leaves_no_image_folder(tmp_path: Path) -> None:
    encoded = io.BytesIO()
    Image.new("RGB", (100, 200)).save(encoded, format="PNG")
    row = {
        "image": [{"bytes": encoded.getvalue(), "path": None}],
        "objects": [{"bbox": [[1.0, 2.0, 3.0]], "label": ["a"]}],
    }
    data = datasets.Dataset.from_dict(row).cast_column("image", datasets.Image())
    data.save_to_disk(tmp_path / "set")
    done = stage2("hf", tmp_path / "set", "--boxes", "coco", "--output", tmp_path / "out" / "x.jsonl")
    assert (done.returncode, "its box is not four numbers (0 object 0: [1.0, 2.0, 3.0])" in done.stderr) == (65, True)
    assert list((tmp_path / "out").iterdir()) == []


LOST = {
    "confidences": ("0 .5 .5 .2 .2 .9", yolo.CONFIDENCE),
    "pixels": ("0 50 50 20 20", NOT_SHARES),
    "a class that there is not": ("7 .5 .5 .2 .2", NO_CATEGORY),
    "an empty label file": ("", "1 image without an object in the annotations"),
    "no label file": (None, yolo.BACKGROUND),
}


@pytest.mark.parametrize("case", LOST)
def test_import_that_keeps_no_label_exits_65_with_reason(tmp_path: Path, case: str) -> None:
    line, reason = LOST[case]
    done = stage2("yolo", odd_sets.yolo(tmp_path, {"a.png": line}), "--output", tmp_path / "x.jsonl")
    assert (done.returncode, reason in done.stderr) == (65, True)
    assert not (tmp_path / "x.jsonl").exists()


def test_yolo_labels_in_pixels_are_accepted_with_units_option(tmp_path: Path) -> None:
    data = odd_sets.yolo(tmp_path, {"a.png": "0 50 50 20 20"})
    done = stage2("yolo", data, "--output", tmp_path / "x.jsonl", "--units", "pixels")
    assert (done.returncode, "1 record, 1 object" in done.stdout) == (0, True)


def test_voc_corners_that_are_sizes_exit_65(tmp_path: Path) -> None:
    source = odd_sets.voc(tmp_path / "voc", {"a": voc_object("cat", (50, 60, 20, 30))})
    done = stage2("voc", source, "--output", tmp_path / "x.jsonl")
    assert (done.returncode, record_writer.REVERSED in done.stderr) == (65, True)


def test_missing_images_are_listed_with_nearest_files(tmp_path: Path) -> None:
    command = coco_file(tmp_path, [{"image_id": 1, "bbox": [10, 20, 30, 40]}])
    document = json.loads((tmp_path / "x.json").read_text())
    document["images"] += [{"id": 2, "file_name": "sub\\b.png"}, {"id": 3, "file_name": "lost.bmp"}]
    (tmp_path / "x.json").write_text(json.dumps(document))
    odd_sets.picture(tmp_path / "images" / "sub" / "b.png")
    done = stage2(*command, "--output", tmp_path / "out.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "images"
    assert done.stdout.splitlines()[1:] == [
        f"  left out: 2 images: {record_writer.MISSING} (sub\\b.png, lost.bmp)",
        f"  looked for {folder}/sub\\b.png; there is {folder}/sub/b.png: its name differs in backslashes",
        f"  looked for {folder}/lost.bmp",
    ]


def test_oversized_images_are_left_out_with_reason(tmp_path: Path) -> None:
    objects = voc_object("dog", (11, 21, 50, 100))
    source, output = odd_sets.voc(tmp_path / "voc", {"a": objects, "b": objects}), tmp_path / "x.jsonl"
    Image.new("1", (10_000, 10_000)).save(source / "JPEGImages" / "a.jpg", format="PNG")
    done = stage2("voc", source, "--output", output)
    reason = odd_sets.unreadable("it has more than 90,000,000 pixels", "make it smaller")
    assert (done.returncode, done.stderr) == (0, ""), "Pillow warns in words of its own"
    assert done.stdout.splitlines() == [
        f"{output}: 1 record, 1 object",
        f"  left out: 1 image: {reason} (JPEGImages/a.jpg)",
    ]


def test_existing_output_file_is_not_overwritten(tmp_path: Path) -> None:
    data, output = odd_sets.yolo(tmp_path, {"a.png": ""}), tmp_path / "x.jsonl"
    output.write_text("mine")
    done = stage2("yolo", data, "--output", output)
    assert done.returncode == 64
    assert "--output" in done.stderr
    assert output.read_text() == "mine"
