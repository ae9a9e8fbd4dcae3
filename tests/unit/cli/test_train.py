"""`stage2 train`: which command reads which data, and what is printed where a step fails. A whole run: integration."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import stage2_cli.train
from stage2_api.errors import ConfigError
from stage2_cli.train import _first_steps, _way_on, train
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
def test_train_command_chooses_import_by_form_of_data(
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


@pytest.mark.parametrize(("code", "words"), [(64, "correct what"), (75, "another try"), (130, "was stopped")])
def test_what_to_do_after_a_step_follows_its_exit_code(code: int, words: str) -> None:
    """After Ctrl-C there was nothing to correct."""
    assert words in _way_on(code)


@pytest.mark.parametrize("files", [[], ["a.jpg"], ["a.json", "b.json"], ["a.jsonl", "b.jsonl"]])
def test_folder_of_unknown_form_is_refused_with_known_forms(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as refused:
        train(ProjectRequest(tmp_path, None, "lost", 0, tmp_path / "run"))
    (problem,) = refused.value.problems
    assert (problem.path, problem.value) == ("--data", str(tmp_path))
    assert "data.yaml (YOLO)" in problem.rule


def test_missing_data_folder_is_refused(tmp_path: Path) -> None:
    words = ["train", "--data", "lost", "--model", "lost", "--gpus", "0"]
    done = subprocess.run([STAGE2, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "--data: 'lost'" in done.stderr
    assert "Traceback" not in done.stderr


def test_gpus_of_a_machine_without_a_driver_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 17 GB was fetched and prepared, and then there was no GPU."""
    monkeypatch.setattr(stage2_cli.train, "loaded_driver", lambda: None)
    with pytest.raises(ConfigError) as refused:
        train(ProjectRequest(tmp_path / "lost", None, "lost", 4, tmp_path / "run"))
    assert [(problem.path, problem.value) for problem in refused.value.problems] == [("--gpus", 4)]


def begun(tmp_path: Path, **changes: Any) -> ProjectRequest:
    """A request whose import is done, and whose project is not there yet."""
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "x.json").write_text("{}")
    request = replace(ProjectRequest(folder, None, "lost", 0, tmp_path / "run"), **changes)
    assert [step.words[0] for step in _first_steps(request, None)] == ["import", "init"]
    request.output.with_name("run.jsonl").touch()
    return request


def refusals(request: ProjectRequest, units: str | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        list(_first_steps(request, units))
    return {problem.path: f"{problem.rule}; {problem.way_out}" for problem in refused.value.problems}


def test_other_data_for_existing_project_are_refused(tmp_path: Path) -> None:
    """The records of the first data were trained on, with no word about it."""
    request = begun(tmp_path)
    (request.data / "x.json").write_text("[]")
    run = tmp_path / "run"
    assert refusals(request) == {
        "--data": f"is not what {run}.jsonl was made from; name another --output, or remove {run}.jsonl, "
        f"{run}.made-from.json"
    }


def test_additional_image_counts_as_other_data(tmp_path: Path) -> None:
    request = begun(tmp_path)
    (request.data / "b.png").touch()
    assert list(refusals(request)) == ["--data"]


def test_project_continues_after_data_folder_moves_or_model_is_corrected(tmp_path: Path) -> None:
    request = begun(tmp_path)
    moved = replace(request, data=request.data.rename(tmp_path / "moved"), model="corrected")
    step, _ = _first_steps(moved, None)
    assert step.product is not None
    assert step.product.exists()


def test_other_options_for_existing_project_are_refused(tmp_path: Path) -> None:
    request = begun(tmp_path)
    request.output.mkdir()
    (request.output / "stage2.yaml").touch()
    assert len(list(_first_steps(request, None))) == 2
    other = replace(request, held_out=request.data / "x.json", model="other", gpus=1, images=(tmp_path,))
    assert list(refusals(other, "shares")) == ["--units", "--val-data", "--images", "--model", "--gpus"]


@pytest.mark.parametrize("text", ["[]", "{", None])
def test_project_of_unknown_origin_is_refused(tmp_path: Path, text: str | None) -> None:
    request = begun(tmp_path)
    note = tmp_path / "run.made-from.json"
    note.unlink() if text is None else note.write_text(text)
    assert "no run.made-from.json that says what it was made from" in refusals(request)["--output"]


def test_output_folder_inside_data_folder_does_not_count_as_other_data(tmp_path: Path) -> None:
    request = begun(tmp_path, output=tmp_path / "photos" / "run")
    assert len(list(_first_steps(request, None))) == 2


def test_units_are_passed_to_the_import_and_refused_for_a_data_file(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"image": "a.png", "conversations": []}))
    request = ProjectRequest(tmp_path / "x.jsonl", None, "lost", 0, tmp_path / "run")
    step, _ = _first_steps(request, "thousandths")
    assert f"import chat {tmp_path}/x.jsonl --images {tmp_path} --units thousandths" in step.line
    (tmp_path / "y.jsonl").touch()
    assert "whose records name theirs" in refusals(replace(request, data=tmp_path / "y.jsonl"), "pixels")["--units"]
