"""A wrong reward of a package, in every command that meets it: exit code 64, with the reward's own file and line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.unit.api.wrong_jobs import merge_patch
from tests.unit.trainer.grpo.reward_package import install

ROOT = Path(__file__).parents[3]
STAGE2 = str(Path(sys.executable).with_name("stage2"))
CODE = """\
import sys
import time

print("noise of a package", end="")


def nothing(sample):
    sample.answer


def ended(sample):
    sys.exit(0)


def two(sample, extra):
    return 1.0


def short(sample):
    print("noise of a reward", end="")
    return 1.0 / len(sample.answer.objects)


def slow(sample):
    time.sleep(8)
    return 1.0


def right(sample):
    print("noise of a reward", end="")
    return len(sample.answer.objects)
"""
LINES = {"nothing": 7, "ended": 12, "two": 15, "short": 21}
COMMANDS = {
    "validate": ["validate", "run.yaml"],
    "doctor": ["doctor", "run.yaml", "--cpu"],
    "inspect": ["inspect", "run.yaml", "--rewards", "--sample", "0", "--response-file", "answer.txt"],
    "learn": ["learn", "run.yaml"],
    "run": ["run", "job.yaml", "--engine", "stub", "--map", "/data=."],
}


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that calls a command on a GRPO run with one reward of a package."""
    Image.new("RGB", (96, 96)).save(tmp_path / "a.png")
    objects = [{"desc": "red box", "bbox_2d": [1, 2, 30, 40]}]
    record = {"images": ["a.png"], "width": 96, "height": 96, "units": "pixels", "objects": objects}
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 40)
    (tmp_path / "answer.txt").write_text("{}")

    def called(command, reward, *options):
        install(tmp_path, monkeypatch, CODE, [reward])
        job = yaml.safe_load((ROOT / "examples" / "job-grpo-objects-tiny.yaml").read_text())
        custom = {"train_jsonl": "/data/train.jsonl", "val_jsonl": "/data/held-out.jsonl"}
        rlhf = {"reward_funcs": [f"theirs.{reward}"], "reward_weights": [1.0]}
        model = {"model": str(ROOT / "examples" / "tiny-qwen3-vl")}
        job = merge_patch(job, {"spec": {"config": {"custom": custom, "rlhf": rlhf, "model": model}}})
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        custom = {"train_jsonl": "train.jsonl", "val_jsonl": "held-out.jsonl"}
        run = merge_patch(job["spec"]["config"], {"custom": custom, "training": {"output_dir": "out"}})
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        (tmp_path / "token").write_text("a" * 64)
        (tmp_path / "token").chmod(0o600)
        environment = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
            "STAGE2_TOKEN_FILE": str(tmp_path / "token"),
        }
        line = [STAGE2, *COMMANDS[command], *options]
        return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return called


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        *((command, "nothing") for command in COMMANDS),
        *(("validate", reward) for reward in LINES),
        ("inspect", "ended"),
    ],
)
def test_wrong_reward_ends_command_with_64_and_its_source_line(call, command, reward):
    done = call(command, reward)
    shown = done.stdout + done.stderr
    assert done.returncode == 64, shown
    assert f"their_rewards.py:{LINES[reward]}" in shown
    assert "Traceback" not in shown
    assert "is ready on" not in shown, "no server starts"


@pytest.mark.parametrize(("command", "option"), [("inspect", "--json"), ("validate", "--json")])
def test_reward_output_does_not_pollute_json_output(call, command, option):
    done = call(command, "right", option)
    assert json.loads(done.stdout)
    assert "noise of a package" in done.stderr


def test_valid_package_reward_is_called_and_named(call):
    done = call("validate", "right")
    assert done.returncode == 0, done.stderr
    assert "theirs.right: score the first record's answer, and an empty one" in done.stdout


def test_slow_reward_is_named_with_elapsed_seconds(call):
    done = call("inspect", "slow")
    assert done.returncode == 0, done.stderr
    assert re.search(r"reward theirs\.slow, record train\.jsonl:1 \(\d s\)", done.stderr)
