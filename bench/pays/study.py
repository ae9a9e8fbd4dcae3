"""The runs of the comparison, one after the other; each is done once, and one that was broken off goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from bench.pays.arms import ARMS, Config, Sizes, arm_config, stage1_config

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-qwen3-vl"
IMAGE_SIDE, MOST_DIGITS = 96, 3

Learn = Callable[[Path], None]


@dataclass(frozen=True)
class Study:
    """A folder in which the comparison is made. learn: trains a configuration file to its end."""

    folder: Path
    sizes: Sizes
    learn: Learn

    @property
    def data(self) -> Path:
        """The folder of the records, `train.jsonl` and `val.jsonl`."""
        return self.folder / "project" / "data"

    @property
    def start(self) -> Path:
        """The model from which all arms start."""
        return self.folder / "start"

    def run_folder(self, arm: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / f"{arm}-{seed}"

    def prepare(self) -> None:
        """Make data and start, as far as they are not there."""
        if not (self.data / "val.jsonl").exists():
            self._make_data()
        if not self.start.exists():
            output = self.folder / "stage1"
            self._train("stage1", stage1_config(self.sizes, MODEL, self.data, output))
            checkpoint = output / f"checkpoint-{self.sizes.stage1_steps}"
            _command("stage2_cli", "export", checkpoint, "--output", self.start)

    def run(self, arms: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Train the arms that have not been trained; yield each that is there. All arms of a seed come together."""
        for seed in seeds:
            for arm in arms:
                output = self.run_folder(arm, seed)
                if not is_done(output, self.sizes.steps):
                    self._train(f"{arm}-{seed}", arm_config(ARMS[arm], seed, self.sizes, self.start, self.data, output))
                yield arm, seed

    def _make_data(self) -> None:
        digits, sizes = self.folder / "digits", self.sizes
        counts = ["--train", sizes.train, "--test", sizes.held_out, "--size", IMAGE_SIDE, "--most", MOST_DIGITS]
        made = [sys.executable, ROOT / "examples" / "make_digits.py", digits, *counts]
        subprocess.run(list(map(str, made)), check=True)
        train = ["--coco", digits / "train.json", "--images", digits / "train"]
        held_out = ["--val-coco", digits / "test.json", "--val-images", digits / "test"]
        rest = ["--model", MODEL, "--gpus", 0, "--output", self.folder / "project"]
        _command("stage2_cli", "init", *train, *held_out, *rest)

    def _train(self, name: str, config: Config) -> None:
        path = self.folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.learn(path)


def records_of(output: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of a run's log of one kind; none where it has not begun."""
    path = output / "stage2_log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [one for line in lines if (one := json.loads(line))["event"] == event]


def is_done(output: Path, steps: int) -> bool:
    """Whether a run was evaluated after its last step, which is the last thing that it does."""
    return any(one["step"] == steps for one in records_of(output, "evaluation"))


def learn_in_a_process(path: Path) -> None:
    """Run `stage2 learn` on a configuration file."""
    _command("stage2_cli", "learn", path)


def _command(module: str, *arguments: object) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True)
