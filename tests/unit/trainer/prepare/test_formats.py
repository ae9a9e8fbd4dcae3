"""Which import reads a file or folder: decided by what it holds, not by its name."""

import json
from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import formats
from stage2_trainer.prepare.formats import data_file, import_words

COCO = {"images": [], "annotations": [], "categories": []}
LABELME = {"shapes": [], "imagePath": "a.png"}
STUDIO = {"data": {"image": "a.png"}, "annotations": []}
MIN = {"image": "a.png", "annotator": 1, "annotation_id": 1}
SWIFT = {"messages": [], "images": ["a.png"], "objects": {}}
QWEN = {"image": "a.png", "conversations": []}
OURS = {"images": ["a.png"], "width": 1, "height": 1, "objects": []}


def lines(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


# The files of a folder d, the path that is given, and the words (FILE and DIR stand for that file and the folder).
CASES = {
    "records": ({"a.jsonl": lines(OURS)}, "d/a.jsonl", None),
    "a folder of records": ({"a.jsonl": lines(OURS), "b.json": "5"}, "d", None),
    "an empty data file": ({"a.jsonl": ""}, "d/a.jsonl", None),
    "COCO": ({"a.json": json.dumps(COCO)}, "d/a.json", "coco --annotations d/a.json --images d"),
    "a folder of COCO": ({"a.json": json.dumps(COCO)}, "d", "coco --annotations d/a.json --images d"),
    "JSON of no known form": ({"a.json": "{}"}, "d/a.json", "coco --annotations d/a.json --images d"),
    "Label Studio": ({"a.json": json.dumps([STUDIO])}, "d", "labelstudio d/a.json --images d"),
    "Label Studio with predictions": (
        {"a.json": json.dumps([{"data": {}, "predictions": []}])}, "d", "labelstudio d/a.json --images d"
    ),
    "JSON-MIN, with a byte order mark": (
        {"a.json": "\ufeff" + json.dumps([MIN], indent=1)}, "d/a.json", "labelstudio d/a.json --images d"
    ),
    "ms-swift": ({"a.jsonl": lines(SWIFT, SWIFT)}, "d", "chat d/a.jsonl --images d"),
    "Qwen, as a list": ({"a.json": json.dumps([QWEN], indent=1)}, "d/a.json", "chat d/a.json --images d"),
    "a file of LabelMe": ({"a.json": json.dumps(LABELME)}, "d/a.json", "labelme d"),
    "a folder of one LabelMe file": ({"a.json": json.dumps(LABELME)}, "d", "labelme d"),
    "a folder of LabelMe": ({f"{name}.json": json.dumps(LABELME) for name in "abc"}, "d", "labelme d"),
    "LabelMe behind JSON of something else": (
        {"a.json": "{}", "b.json": json.dumps(LABELME)}, "d", "labelme d"
    ),
    "LabelMe in folders below": ({f"{name}/x.json": json.dumps(LABELME) for name in "ab"}, "d", "labelme d"),
    "VOC beside JSON": ({"a.xml": "", "b.json": json.dumps(COCO)}, "d", "voc d"),
    "YOLO": ({"data.yaml": "", "b.json": "{}"}, "d", "yolo d"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_import_is_found_by_content(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    files, data, words = CASES[case]
    for name, text in files.items():
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = import_words(Path(data))
    assert found == (None if words is None else tuple(words.split()))
    if words is None:
        assert data_file(Path(data)) == Path("d/a.jsonl")


def test_records_with_other_file_extension_count_as_data_file(tmp_path):
    (tmp_path / "a.json").write_text(lines(OURS, OURS))
    assert import_words(tmp_path / "a.json") is None


def test_own_output_files_are_not_taken_for_annotations(tmp_path):
    for name, text in {"x.json": json.dumps([STUDIO]), "run.jsonl": lines(OURS), "run.made-from.json": "{}"}.items():
        (tmp_path / name).write_text(text)
    own = ("run.jsonl", "run.made-from.json")
    assert import_words(tmp_path, own=own) == ("labelstudio", str(tmp_path / "x.json"), "--images", str(tmp_path))


def test_named_image_folder_is_passed_to_import(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([STUDIO]))
    assert import_words(tmp_path / "a.json", [Path("photos")])[-1] == "photos"


@pytest.mark.parametrize("files", [{}, {"a.json": "{}", "b.json": "{}"}, {"a.jsonl": "", "b.jsonl": ""}, {"a.jpg": ""}])
def test_folder_without_known_format_is_refused_with_all_formats(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"--data.*Label Studio.*data\.yaml \(YOLO\)"):
        import_words(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, '{"a":' * 100_000, "\0", "\xff", "nul"])
def test_first_value_of_broken_file_is_none(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    assert formats.first_value(tmp_path / "a.json") is None


def test_only_the_head_of_a_large_file_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "HEAD", 200)
    (tmp_path / "a.jsonl").write_text(lines(SWIFT) + "x" * 1000)
    assert formats.first_value(tmp_path / "a.jsonl") == SWIFT
    (tmp_path / "b.json").write_text(json.dumps(COCO | {"images": [{"id": one} for one in range(100)]}))
    assert import_words(tmp_path / "b.json")[0] == "coco"
