"""`stage2 train`: from a folder of pictures to the page of stage 2, on the CPU with the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

pytestmark = pytest.mark.in_turns(2)

ROOT = Path(__file__).parents[2]
STAGE2 = str(Path(sys.executable).with_name("stage2"))
STEPS = 2
SMALL = ("max_steps", "eval_steps", "save_steps")
ODD_NAMES = ("a b.png", "straße.png", "c'd.png", "#1.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder as somebody has it: pictures with odd names, and COCO's file beside them."""
    folder = tmp_path_factory.mktemp("stranger") / "my pictures"
    folder.mkdir()
    for name in ODD_NAMES:
        Image.new("RGB", (96, 64), "white").save(folder / name)
    images = [{"id": i, "file_name": name, "width": 96, "height": 64} for i, name in enumerate(ODD_NAMES)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [8 * i, 8, 24, 24]} for i in range(len(ODD_NAMES))]
    coco = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "red box"}]}
    (folder / "_annotations.coco.json").write_text(json.dumps(coco))
    return folder


def train(folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["--data", folder.name, "--model", str(ROOT / "examples" / "tiny-qwen3-vl"), "--gpus", "0"]
    changes = [f"--set=training.{key}={STEPS}" for key in SMALL] + ["--set=training.effective_batch_size=2"]
    command = [STAGE2, "train", *words, "--output", "my run", *changes]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def trained(folder) -> subprocess.CompletedProcess[str]:
    return train(folder)


def test_train_command_ends_with_report_and_boxes_on_held_out_picture(folder, trained):
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    page = folder.parent / "my run" / "runs" / "stage2.html"
    assert trained.stdout.splitlines()[-1] == f"page: {page}"
    assert "<svg" in page.read_text()
    assert list((folder.parent / "my run" / "runs" / "boxes").glob("*.png"))


def test_train_command_prints_each_step_as_runnable_command(folder, trained):
    steps = [line.removeprefix("$ ") for line in trained.stdout.splitlines() if line.startswith("$ ")]
    assert steps[0] == (
        "stage2 import coco --annotations 'my pictures/_annotations.coco.json' --images 'my pictures'"
        " --output 'my run.jsonl'"
    )
    assert steps[1].startswith("stage2 init --data 'my run.jsonl' --images 'my pictures' --model ")
    assert steps[2] == "cd 'my run'"
    later = [line.strip() for line in (folder.parent / "my run" / "README.md").read_text().splitlines()]
    of_readme = [line for line in later if line.startswith("stage2 ")]
    assert [line.partition(" --set=")[0] for line in steps[3:-1]] == of_readme
    assert steps[-1].startswith("stage2 infer models/stage2 ")
    done = subprocess.run(
        ["bash", "-c", f"PATH={Path(STAGE2).parent}:$PATH; cd 'my run'; {steps[7]}"],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_repeated_train_command_skips_completed_steps(folder, trained):
    again = train(folder)
    assert again.returncode == 0, again.stderr
    assert sum(line.startswith("done before: ") for line in again.stdout.splitlines()) == 8
    (only,) = [line for line in again.stdout.splitlines() if line.startswith("$ stage2 ")]
    assert only.startswith("$ stage2 report")
