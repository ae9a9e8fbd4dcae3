"""docs/tutorial.md by its own commands: from annotations to a stage-2 model, on digits and on the tiny model.

The commands are the page's, in its order, with fewer images and steps. Those for GPUs run as far as a machine without
any goes: COCO's files are the digits', the 8B is the tiny model. What `kubectl` is given is looked at, not applied.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from stage2_api.advice import idle_settings
from stage2_api.job import RolloutMatchingJob
from stage2_api.parsing import parse_job
from tests.support import forked

pytestmark = pytest.mark.in_turns(2)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = "\n".join(re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL))
STEPS = 2
SMALLER = {
    "--train 2000 --test 64": "--train 8 --test 2",
}
# What makes the jobs of a CPU as small, between the command that writes them and those that run them.
FEWER_STEPS = (
    f"sed -i -E 's/(max_steps|eval_steps|save_steps): [0-9]+/\\1: {STEPS}/; s/(effective_batch_size): [0-9]+/\\1: 4/'"
    " stage1.yaml stage2.yaml"
)
ENTERED = "cd out/tutorial\n"
# COCO's folders and the stock model, where the page has them: here they are the digits and the tiny model.
STAND_INS = """
mkdir -p coco/annotations Qwen
cp -r out/digits/train coco/train2017
cp -r out/digits/test coco/val2017
ln -s "$PWD/out/digits/train.json" coco/annotations/instances_train2017.json
ln -s "$PWD/out/digits/test.json" coco/annotations/instances_val2017.json
ln -s "$PWD/out/stock" Qwen/Qwen3-VL-8B-Instruct
"""
KUBECTL = 'kubectl() { printf "%s\\n" "$*" >> kubectl.log; }\n'


def script() -> str:
    """Return the page's commands, made small."""
    text = COMMANDS
    for long, short in SMALLER.items():
        assert text.count(long) == 1, long
        text = text.replace(long, short)
    assert text.count(ENTERED) == 1
    text = text.replace(ENTERED, f"{ENTERED}{FEWER_STEPS}\n")
    cpu, gpus = text.split("cd ../..\n")
    return f"set -eu\n{KUBECTL}{cpu}cd ../..\n{STAND_INS}{gpus}"


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Path:
    """The folder in which the page was followed to its end."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "examples").symlink_to(ROOT / "examples")
    commands = forked.command_folder(
        tmp_path_factory.mktemp("commands"), imports=[*forked.VLLM, *forked.STUB, *forked.LEARNER]
    )
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script()], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return folder


def records(followed: Path, stage: str, event: str) -> list[dict]:
    lines = (followed / "out/tutorial/runs" / stage / "stage2_log.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["event"] == event]


def test_tutorial_draws_records_before_it_trains(followed: Path) -> None:
    with Image.open(followed / "out/digits/train.png") as picture:
        assert min(picture.size) > 96


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_each_tutorial_stage_completes_and_is_evaluated_before_and_after(followed, stage):
    assert [record["step"] for record in records(followed, stage, "step")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in records(followed, stage, "evaluation")] == [0, STEPS]


def test_stage_2_starts_from_exported_model_of_stage_1(followed):
    (record,) = records(followed, "stage2", "reproducibility")
    assert record["model"] == str((followed / "out/tutorial/models/stage1").resolve())


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_each_tutorial_stage_has_picture_and_page(followed, stage):
    with Image.open(followed / f"out/tutorial/runs/{stage}.png") as image:
        assert min(image.size) > 300
    assert "<svg" in (followed / f"out/tutorial/runs/{stage}.html").read_text(), "the curves of the page"


def test_exported_models_load_without_stage2(followed):
    code = (
        "import sys; from transformers import AutoModelForImageTextToText as M; [*map(M.from_pretrained, sys.argv[1:])]"
    )
    models = [str(followed / "out/tutorial/models" / stage) for stage in ("stage1", "stage2")]
    subprocess.run([sys.executable, "-c", code, *models], check=True, capture_output=True)


def job(followed: Path, name: str) -> RolloutMatchingJob:
    return parse_job(yaml.safe_load((followed / name).read_text()))


def test_kubectl_applies_tutorial_jobs_with_documented_gpus(followed):
    commands = [shlex.split(line) for line in (followed / "kubectl.log").read_text().splitlines()]
    applied = [job(followed, command[2]) for command in commands if command[:2] == ["apply", "-f"]]
    waited = [command[-1].removeprefix("rmj/") for command in commands if command[0] == "wait"]
    assert [one.metadata.name for one in applied] == waited
    assert [(one.spec.rollout.servers, one.spec.learner.gpus) for one in applied] == [(0, 4), (3, 1)]
    assert [idle_settings(one.spec.config) for one in applied] == [(), ()]


def test_project_readme_has_commands_of_tutorial(followed):
    readme = (followed / "out/tutorial/README.md").read_text()
    for command in re.findall(r"^    (stage2 .*)$", readme, re.MULTILINE):
        assert command.partition(" --picture")[0] in PAGE, command


def test_sizes_shown_in_tutorial_are_in_job(followed):
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    written = (followed / "out/tutorial/stage1.yaml").read_text()
    for line in shown.splitlines():
        key = line.partition(":")[0]
        assert re.search(rf"^ *{key}: \d+ # ", written, re.MULTILINE), line
