"""Commands that need no model finish before any heavy import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.api.grpo_configs import GOOD
from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.report.inspected import COMPLETE, TINY_MODEL, write_records

pytestmark = pytest.mark.in_turns(3, apart=True)

HEAVY = {"torch", "transformers", "vllm", "trl", "accelerate", "tensorboard"}
SERVER = {"servers": [{"base_url": "http://127.0.0.1:9", "group_port": 9}]}
MATCHING: dict[str, Any] = {
    "model": {"model": str(TINY_MODEL)},
    "training": {"output_dir": "out"},
    "custom": {"extra": {"rollout_matching": {"vllm": {"mode": "server", "server": SERVER}}}},
}
COLOCATED = merge_patch(
    MATCHING, {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate", "max_model_len": 4096}}}}}
)
SCRIPT = """
import sys
from stage2_cli.main import main
sys.argv[0] = "stage2"
try:
    main()
except SystemExit as end:
    code = end.code
print("\\n".join(sys.modules), file=open({modules!r}, "w"))
sys.exit(code)
"""


KEPT = {name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")}


def stage2(folder: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run the command; return its output and the libraries that it imported."""
    (folder / "token").write_text("secret")
    modules = folder / "modules"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(modules=str(modules)), *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "STAGE2_TOKEN_FILE": str(folder / "token"), **KEPT, **environment},
    )
    return done, {name.partition(".")[0] for name in modules.read_text().splitlines()}


def run_over(folder: Path, run: dict[str, Any], line: dict[str, Any]) -> str:
    (folder / "train.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "run.yaml").write_text(yaml.safe_dump(merge_patch(run, {"custom": {"train_jsonl": "train.jsonl"}})))
    return str(folder / "run.yaml")


BROKEN = {"images": ["data:image/png;base64,AAAA"], "width": 0, "height": 9, "objects": []}
NO_SUMMARY = {"images": ["data:image/png;base64,AAAA"]}


@pytest.mark.parametrize(
    ("run", "line", "shown", "processes"),
    [
        (MATCHING, BROKEN, "train.jsonl:1 width", "1"),
        (GOOD, NO_SUMMARY, "train.jsonl:1 metadata._fusion_template", "1"),
        (COLOCATED, BROKEN, "train.jsonl:1 width", "2"),
    ],
    ids=["matching", "grpo", "in processes"],
)
def test_broken_data_file_ends_learn_before_torch_is_imported(
    tmp_path: Path, run: dict[str, Any], line: dict[str, Any], shown: str, processes: str
) -> None:
    words = tmp_path / "termination.json"
    done, loaded = stage2(
        tmp_path, *("learn", run_over(tmp_path, run, line), "--processes", processes), STAGE2_TERMINATION_LOG=str(words)
    )
    assert done.returncode == 64, done.stderr
    assert shown in done.stderr
    assert shown in json.loads(words.read_text())["message"]
    assert loaded & HEAVY == set()
    assert not (tmp_path / "out").exists()


def test_unknown_engine_is_refused_before_heavy_imports(tmp_path: Path) -> None:
    done, loaded = stage2(tmp_path, "run", "lost.yaml", "--engine", "foo")
    assert (done.returncode, "foo" in done.stderr) == (2, True)
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "words",
    [
        ["run", "lost.yaml"],
        ["validate", "lost.yaml"],
        ["doctor", "lost.yaml"],
        ["prepare", "lost", "--output", "new"],
        ["init", "--data", "lost.jsonl", "--model", "lost", "--output", "new"],
        ["export", "lost", "--output", "new"],
        ["evaluate", "lost.yaml", "--checkpoint", "lost"],
        ["inspect", "lost.yaml", "--sample", "1"],
        ["serve", "lost.yaml", "--server", "0"],
        ["report", "lost"],
    ],
    ids=lambda words: words[0],
)
def test_missing_path_is_refused_before_heavy_imports(tmp_path: Path, words: list[str]) -> None:
    done, loaded = stage2(tmp_path, *words)
    assert (done.returncode, "lost" in done.stderr) == (64, True), done.stderr
    assert loaded & {*HEAVY, "datasets"} == set()
    assert words[0] != "report" or loaded & {"PIL", "scipy"} == set()


def test_data_files_are_validated_without_heavy_imports(tmp_path: Path) -> None:
    done, loaded = stage2(tmp_path, "validate", run_over(tmp_path, MATCHING, BROKEN))
    assert done.returncode == 64
    assert "train.jsonl:1 width: 0" in done.stderr
    assert loaded & {*HEAVY, "scipy"} == set()


def test_response_file_is_inspected_without_heavy_imports(tmp_path: Path) -> None:
    (tmp_path / "answer.txt").write_text(COMPLETE)
    record = ("--record", str(write_records(tmp_path)), "--line", "1", "--tokenizer", str(TINY_MODEL))
    done, loaded = stage2(tmp_path, "inspect", *record, "--response-file", "answer.txt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["false_negatives"] == [2]
    assert loaded & HEAVY == set()
