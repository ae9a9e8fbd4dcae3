"""Inputs on the command line are files or pipes; anything else is refused without waiting and without a traceback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from stage2_api.errors import EXIT_CONFIG, ConfigError
from stage2_cli.config_files import load_config
from stage2_cli.main import app

MINIMAL = {
    "model": {"model": "model"},
    "training": {"output_dir": "out", "eval_strategy": "no"},
    "custom": {"train_jsonl": "train.jsonl", "trainer_variant": "sft"},
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(yaml.safe_dump({"extends": "odd.yaml", **MINIMAL}))
    Path("over.yaml").write_text(yaml.safe_dump({**MINIMAL, "custom": {"train_jsonl": "odd.yaml"}}))
    return tmp_path


odd_file = pytest.mark.parametrize("odd", [fifo, unix_socket, zeros])


@odd_file
def test_base_config_must_be_regular_file(folder, odd):
    odd(Path("odd.yaml"))
    with pytest.raises(ConfigError, match=r"odd\.yaml.*(cannot be read|must be a YAML file)"):
        load_config(Path("run.yaml"))


COMMANDS = [
    ["validate", "odd.yaml"],
    ["render", "odd.yaml"],
    ["run", "odd.yaml"],
    ["learn", "odd.yaml"],
    ["data", "odd.yaml"],
    ["report", "odd.yaml"],
    ["report", "odd.yaml", "--html", "x.html"],
    ["replay", "odd.yaml", "--step", "1"],
    ["evaluate", "--rollouts", "odd.yaml", "--records", "odd.yaml"],
    ["inspect", "--record", "odd.yaml", "--tokenizer", ".", "--response-ids", "x"],
    ["import", "coco", "--annotations", "odd.yaml", "--images", ".", "--output", "x.jsonl"],
    ["import", "yolo", "odd.yaml", "--output", "x.jsonl"],
    ["import", "voc", "odd.yaml", "--output", "x.jsonl"],
    ["init", "--data", "odd.yaml", "--model", "m", "--output", "x"],
]


@odd_file
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_special_file_is_refused_in_single_sentence(folder, odd, words):
    odd(Path("odd.yaml"))
    assert refused(words)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_missing_file_is_refused_in_single_sentence(folder, words):
    assert refused(words)


TOO_LONG = "x" * 300  # of a name, for Linux's file systems
NAMED = [
    *COMMANDS,
    ["import", "hf", "odd.yaml", "--boxes", "coco", "--output", "x.jsonl"],
    ["import", "coco", "--annotations", "x.json", "--images", "odd.yaml", "--output", "x.jsonl"],
    ["prepare", "odd.yaml", "--output", "x"],
    ["data", "run.yaml", "--model", "odd.yaml"],
    ["init", "--data", "run.yaml", "--images", "odd.yaml", "--model", "m", "--output", "x"],
    ["init", "--data", "run.yaml", "--model", "odd.yaml", "--output", "x"],
]


@pytest.mark.parametrize("words", NAMED, ids=" ".join)
def test_too_long_file_name_is_refused_in_single_sentence(folder, words):
    assert refused([TOO_LONG if word == "odd.yaml" else word for word in words])


def refused(words):
    """Return whether the command reports a configuration error."""
    done = CliRunner().invoke(app, words)
    return isinstance(done.exception, ConfigError) or done.exit_code == EXIT_CONFIG


@odd_file
def test_special_file_as_data_file_is_reported_by_validate(folder, odd):
    odd(Path("odd.yaml"))
    done = CliRunner().invoke(app, ["validate", "over.yaml"])
    assert done.exit_code == EXIT_CONFIG


def test_config_can_be_read_from_pipe(folder):
    stage2 = Path(sys.executable).parent / "stage2"
    Path("plain.yaml").write_text(yaml.safe_dump(MINIMAL))
    command = f"{stage2} validate <(cat plain.yaml)"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
