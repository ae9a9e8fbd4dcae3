"""`stage2 train`: which command reads which data, and what is printed where a step fails. A whole run: integration."""

import subprocess
import sys
from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_cli.train import train
from stage2_trainer.prepare.project_request import ProjectRequest

STAGE2 = str(Path(sys.executable).with_name("stage2"))


def first_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], data: str) -> str:
    """The first command of a training on these data, which fails, because none of the files has any content."""
    monkeypatch.chdir(tmp_path)
    code = train(ProjectRequest(Path(data), None, "lost", 0, Path("run")))
    printed = capfd.readouterr()
    assert code
    (line,) = [line for line in printed.out.splitlines() if line.startswith("$ stage2")]
    assert f"exit code {code} of: {line.removeprefix('$ ')}; correct what it reports" in printed.err
    return line.removeprefix("$ stage2 ")


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    ("files", "data", "command"),
    [
        (["a.jsonl"], "d/a.jsonl", "init --data d/a.jsonl --model lost"),
        (["a.jsonl", "b.jpg"], "d", "init --data d/a.jsonl --model lost"),
        (["b.json"], "d/b.json", "import coco --annotations d/b.json --images d --output run.jsonl"),
        (["b.json", "c.txt"], "d", "import coco --annotations d/b.json --images d --output run.jsonl"),
        (["data.yaml", "b.json"], "d", "import yolo d --output run.jsonl"),
        (["c.yml"], "d/c.yml", "import yolo d/c.yml --output run.jsonl"),
        (["Annotations/d.xml"], "d", "import voc d --output run.jsonl"),
        (["d.xml"], "d", "import voc d --output run.jsonl"),
    ],
)
def test_a_folder_or_file_is_read_by_the_command_for_its_form(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    files: list[str],
    data: str,
    command: str,
) -> None:
    for name in files:
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).touch()
    assert first_line(tmp_path, monkeypatch, capfd, data).startswith(command)


@pytest.mark.parametrize("files", [[], ["a.jpg"], ["a.json", "b.json"], ["a.jsonl", "b.jsonl"]])
def test_a_folder_of_no_form_is_refused_with_the_forms(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        train(ProjectRequest(tmp_path, None, "lost", 0, tmp_path / "run"))
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("--data", str(tmp_path))
    assert "data.yaml (YOLO)" in problem.rule


def test_a_missing_folder_is_refused_by_the_command(tmp_path: Path) -> None:
    words = ["train", "--data", "lost", "--model", "lost", "--gpus", "0"]
    done = subprocess.run([STAGE2, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "--data: 'lost'" in done.stderr
    assert "Traceback" not in done.stderr
