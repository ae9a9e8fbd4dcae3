"""`stage2 data` and `stage2 init` take annotations of other forms, and import them first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.trainer.prepare import odd_sets

pytestmark = pytest.mark.in_turns(3, apart=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of LabelMe with one image."""
    odd_sets.picture(tmp_path / "photos" / "a.png")
    shape = {"label": "cat", "shape_type": "rectangle", "points": [[10, 20], [60, 100]]}
    (tmp_path / "photos" / "a.json").write_text(json.dumps({"imagePath": "a.png", "shapes": [shape]}))
    return tmp_path


def stage2(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stage2_cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_data_command_describes_labelme_folder_and_leaves_no_files(folder: Path) -> None:
    done = stage2(folder, "data", "photos", "--json", "--pictures", "page.png")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["records"], found["classes"]) == (1, {"cat": 1})
    assert list(found["suspicious"]) == ["an image of one colour"], "its images are found from there"
    assert "1 record, 1 object" in done.stderr
    assert sorted(path.name for path in folder.rglob("*")) == ["a.json", "a.png", "page.png", "photos"]


def test_data_command_exits_with_code_of_its_import(folder: Path) -> None:
    (folder / "photos" / "a.png").unlink()
    done = stage2(folder, "data", "photos")
    assert (done.returncode, done.stdout) == (65, "")
    assert "no object was kept" in done.stderr


def test_init_command_prints_its_import_and_continues(folder: Path) -> None:
    done = stage2(folder, "init", "--data", "photos", "--model", "./lost", "--gpus", "0", "--output", "run")
    assert done.returncode == 64, done.stderr
    assert "$ stage2 import labelme photos --output run.jsonl" in done.stdout
    assert "--data: 'run.jsonl'\n    rule: must hold two records at least" in done.stderr
    assert (folder / "run.jsonl").exists()


def failed_init(folder: Path) -> subprocess.CompletedProcess[str]:
    odd_sets.picture(folder / "photos" / "b.png")
    words = ["--data", "photos", "--model", "./lost", "--gpus", "0", "--output", "run"]
    return stage2(folder, "init", *words)


def test_init_goes_on_from_the_import_of_a_failed_attempt(folder: Path) -> None:
    """It refused its own run.jsonl, and told the person to remove it."""
    assert failed_init(folder).returncode == 64
    again = failed_init(folder)
    assert "done before: stage2 import labelme photos --output run.jsonl" in again.stdout
    assert "--data: 'run.jsonl'\n    rule: must hold two records at least" in again.stderr


def test_init_refuses_records_of_other_annotations(folder: Path) -> None:
    failed_init(folder)
    (folder / "photos" / "b.json").write_text("{}")
    again = failed_init(folder)
    assert again.returncode == 64
    assert "is not what run.jsonl was made from" in again.stderr


def test_data_and_init_take_the_units_of_annotations(folder: Path) -> None:
    """The import asks for --units, which neither of the two had."""
    answer = json.dumps([{"bbox_2d": [100, 200, 600, 1000], "label": "cat"}])
    line = {"image": "photos/a.png", "conversations": [{"from": "gpt", "value": answer}]}
    (folder / "x.jsonl").write_text(json.dumps(line) + "\n")
    done = stage2(folder, "data", "x.jsonl", "--units", "thousandths", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["classes"] == {"cat": 1}
    words = ["--data", "x.jsonl", "--model", "./lost", "--gpus", "0", "--output", "run"]
    done = stage2(folder, "init", *words, "--units", "thousandths")
    assert "$ stage2 import chat x.jsonl --images . --units thousandths --output run.jsonl" in done.stdout
    assert (folder / "run.jsonl").exists()


def test_data_refuses_units_that_no_data_file_has(folder: Path) -> None:
    (folder / "x.jsonl").write_text("")
    done = stage2(folder, "data", "x.jsonl", "--units", "shares")
    assert done.returncode == 64
    assert "is of annotations, and x.jsonl is a data file" in done.stderr


def test_folder_whose_name_begins_with_a_dash_is_imported(folder: Path) -> None:
    (folder / "photos").rename(folder / "-photos")
    done = stage2(folder, "data", "./-photos", "--json")
    assert done.returncode == 0, done.stderr
    words = ["--data=-photos", "--model", "./lost", "--gpus", "0", "--output", "run"]
    assert "1 record, 1 object" in stage2(folder, "init", *words).stdout
