"""Paths that stand in a data set lead to regular files, or are answered by a rule: nothing is waited for for ever."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data import files
from stage2_trainer.prepare import record_writer, voc, yolo
from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.hugging_face import HubChoice, read_hub
from stage2_trainer.prepare.voc import VocChoice
from tests.unit.trainer.prepare import odd_sets
from tests.unit.trainer.prepare.odd_sets import Imported, import_voc, import_yolo, picture, unreadable, voc_object

BOX = "0 0.35 0.3 0.5 0.4"
LONG = "x" * 5000
DEEP = "../" * 3000


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def zeros(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    return path


odd_file = pytest.mark.parametrize("odd", [fifo, zeros])


@odd_file
def test_image_list_that_is_not_regular_file_is_refused(tmp_path, odd):
    data = odd_sets.yolo(tmp_path, {"a.png": BOX}, train="list.txt")
    odd(tmp_path / "list.txt")
    with pytest.raises(ConfigError, match=r"list\.txt'; must be a folder, or a list \(Not a regular file\)"):
        import_yolo(tmp_path, data)


@odd_file
def test_data_yaml_that_is_not_regular_file_is_refused(tmp_path, odd):
    odd(tmp_path / "data.yaml")
    with pytest.raises(ConfigError, match=r"data\.yaml: cannot be read .It is a (FIFO|device)"):
        import_yolo(tmp_path, tmp_path)


@odd_file
@pytest.mark.parametrize(
    ("file", "reason"),
    [("labels/train/a.txt", yolo.BROKEN_LABELS), ("images/train/a.png", unreadable("Not a regular file"))],
)
def test_label_file_or_image_that_is_not_regular_file_is_left_out(tmp_path, odd, file, reason):
    data = odd_sets.yolo(tmp_path, {"a.png": BOX, "b.png": BOX})
    odd(tmp_path / file)
    found = import_yolo(tmp_path, data)
    leads_out = odd is zeros and file.endswith(".png")
    assert (len(found.records), found.counts) == (1, {record_writer.OUTSIDE if leads_out else reason: 1})


@odd_file
def test_voc_files_that_are_not_regular_files_are_left_out_or_refused(tmp_path, odd):
    source = odd_sets.voc(tmp_path / "voc", {"a": voc_object(), "b": voc_object()})
    odd(source / "Annotations" / "a.xml")
    found = import_voc(tmp_path, source)
    assert (len(found.records), found.counts) == (1, {voc.BROKEN_ANNOTATION: 1})
    (source / voc.SPLITS).mkdir(parents=True)
    odd(source / voc.SPLITS / "train.txt")
    with pytest.raises(ConfigError, match="--split: 'train'"):
        import_voc(tmp_path, source, VocChoice("train"))


@odd_file
def test_saved_dataset_file_that_is_not_regular_file_is_refused(tmp_path, odd):
    (tmp_path / "saved").mkdir()
    odd(tmp_path / "saved" / "state.json")
    with pytest.raises(ConfigError, match=r"NAME_OR_DIR: .*state\.json is not a regular file"):
        read_hub(str(tmp_path / "saved"), HubChoice("coco"), Tally())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": LONG}, "train: 'x+…; is not under"),
        ({"train": DEEP}, "train: .*; is not under"),
        ({"path": LONG, "train": "lost"}, "train: 'lost'; is not under"),
        ({"train": "a\0b"}, "is not under"),
        ({"train": "list.txt"}, "has no images"),
    ],
)
def test_impossible_split_path_is_refused_with_message(tmp_path, changes, message):
    data = odd_sets.yolo(tmp_path, {"a.png": BOX}, **changes)
    (tmp_path / "list.txt").write_text("")
    with pytest.raises(ConfigError, match=message):
        import_yolo(tmp_path, data)


@pytest.mark.parametrize("name", [LONG, DEEP + "a.png"])
def test_image_with_impossible_path_is_reported_as_missing(tmp_path, name):
    data = odd_sets.yolo(tmp_path, {"a.png": BOX}, train="list.txt")
    (tmp_path / "list.txt").write_text(f"{name}\nimages/train/a.png\n")
    found = import_yolo(tmp_path, data)
    assert len(found.records) == 1
    assert found.tally.images_left_out.total() == 1
    document = {
        "images": [{"id": 1, "file_name": name, "width": 100, "height": 200}],
        "annotations": [],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "x.json").write_text(json.dumps(document))
    read = lambda tally: read_coco(tmp_path / "x.json", tmp_path, tally)  # noqa: E731
    assert Imported(tmp_path / "again" / "x.jsonl", read).tally.images_left_out == {record_writer.MISSING: 1}


def coco(folder: Path) -> str:
    picture(folder / "images" / "a.png")
    image = {"id": 1, "file_name": "a.png", "width": 100, "height": 200}
    one = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 20, 50, 80]}
    return json.dumps({"images": [image], "annotations": [one], "categories": [{"id": 1, "name": "cat"}]})


def test_annotations_option_accepts_pipe(tmp_path):
    (tmp_path / "x.json").write_text(coco(tmp_path))
    stage2 = Path(sys.executable).parent / "stage2"
    command = f"{stage2} import coco --annotations <(cat x.json) --images images --output out.jsonl"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "out.jsonl: 1 record" in done.stdout


def test_oversized_pipe_and_device_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_PIPED", 100)
    reading, writing = os.pipe()
    os.write(writing, coco(tmp_path).encode())
    os.close(writing)
    for named, message in ((f"/dev/fd/{reading}", "larger than 100 bytes"), ("/dev/zero", "is a device")):
        with pytest.raises(ConfigError, match=rf"--annotations: .*must be readable \(.*{message}"):
            read_coco(Path(named), tmp_path / "images", Tally())
    os.close(reading)
