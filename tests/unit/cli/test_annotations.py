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
