"""The page on GRPO: stage2 uses the reward that it shows, from its file and from its package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from PIL import Image

from stage2_trainer.matching import GTObject
from stage2_trainer.matching.ground_truth import serialize_objects
from tests.unit.api.wrong_jobs import merge_patch

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "grpo.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### A reward of your own")[2].partition("### ")[0]
BLOCKS = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
PIP = r"""
pip() {  # builds the wheel with the package's own backend, without the registry, and unpacks it where Python looks
    [ "$1" = install ] || return 1
    (cd "$2" && python -c "
import sys, tomllib, zipfile
from importlib import import_module
backend = import_module(tomllib.load(open('pyproject.toml', 'rb'))['build-system']['build-backend'])
zipfile.ZipFile(f'dist/{backend.build_wheel(\"dist\")}').extractall('$PYTHONPATH')
")
}
"""


def test_documented_reward_scores_from_file_and_from_package(tmp_path: Path) -> None:
    Image.new("RGB", (96, 96)).save(tmp_path / "a.png")
    small, large = GTObject("bolt", "bbox", (0, 0, 40, 40)), GTObject("plate", "bbox", (100, 100, 900, 900))
    objects = [{"desc": one.desc, "bbox_2d": list(one.bins)} for one in (small, large)]
    record = {"images": ["a.png"], "width": 96, "height": 96, "units": "bins", "objects": objects}
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text(8 * (json.dumps(record) + "\n"))  # a round of rollouts
    job = yaml.safe_load((ROOT / "examples" / "job-grpo-objects-tiny.yaml").read_text())
    custom = {"train_jsonl": "train.jsonl", "val_jsonl": "held-out.jsonl"}
    for name, reward in (("run", "my_rewards.py:small"), ("of-package", "mine.small")):
        rewards = {"reward_funcs": ["objects.f1_class", reward], "reward_weights": [1.0, 2.0]}
        run = merge_patch(job["spec"]["config"], {"rlhf": rewards, "custom": custom})
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(run))
    (tmp_path / "answer.txt").write_text(serialize_objects([small]))
    (tmp_path / "site").mkdir()
    write, try_it, _, install = BLOCKS
    try_it = try_it.rstrip() + " --json"
    package = [PIP, install, try_it.replace("run.yaml", "of-package.yaml")]
    script = "\n".join(["set -e", write, try_it, *package])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_rewards.py:small: its file was read, and not run" in done.stdout
    assert "mine.small: score the first record's answer" in done.stdout
    scores = [json.loads(line)["rewards"] for line in done.stdout.splitlines() if line.startswith("{")]
    of_f1 = {"objects.f1_class": 2 / 3}
    assert scores == [{**of_f1, "my_rewards.py:small": 1.0}, {**of_f1, "mine.small": 1.0}], (
        "the small object is found; the large one does not count"
    )
