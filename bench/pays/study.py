"""The runs of the comparison, one after the other; each runs once, and an interrupted one restarts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from bench.pays.arms import (
    ARMS,
    TIMED,
    Arm,
    Config,
    Sizes,
    answer_config,
    arm_config,
    names_config,
    places_config,
    sampling_config,
)

from stage2_api.parsing import parse_run_config
from stage2_api.runconfig import RunConfig
from stage2_trainer import main
from stage2_trainer.checks.preflight import checked_records

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-qwen3-vl"
ANSWERS = "answers.jsonl"
EXPORTED = "exported"  # a run's last weights as a model

Learn = Callable[[RunConfig], None]


@dataclass(frozen=True)
class Run:
    """A run. seconds: whether it trains for as many CPU seconds as arm b, in place of as many steps."""

    arm: str
    seed: int
    seconds: bool = False

    @property
    def name(self) -> str:
        """Its name, and that of its folder."""
        return f"{self.arm}-{self.seed}{'-seconds' if self.seconds else ''}"


@dataclass(frozen=True)
class Study:
    """A folder in which the comparison is made.

    learn: trains a configuration to its end. model: what stage 1 trains.
    """

    folder: Path
    sizes: Sizes
    learn: Learn
    model: Path = MODEL

    @property
    def data(self) -> Path:
        """The folder of the records, `train.jsonl` and `val.jsonl`."""
        return self.folder / "data"

    @property
    def start(self) -> Path:
        """The model from which all arms start."""
        return self.folder / "start"

    @property
    def start_answers(self) -> Path:
        """The answers of the model from which all arms start."""
        return self.folder / "start-answers.jsonl"

    @property
    def sampled_answers(self) -> Path:
        """Several sampled answers of that model to each image; those of round n have step n, from 0."""
        return self.folder / "start-sampled.jsonl"

    def run_folder(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.folder / "runs" / run.name

    def is_done(self, run: Run) -> bool:
        """Whether a run's last weights have answered, which is the last thing that is done."""
        return (self.run_folder(run) / ANSWERS).exists()

    def prepare(self) -> None:
        """Make data, start and its answers, as far as they are not there."""
        if not (self.data / "val.jsonl").exists():
            self._write_pictures()
        if not self.start.exists():
            self._make_start()
        if not self.start_answers.exists():
            self._answer(self.start, self.start_answers)

    def run(self, arms: Sequence[str], seeds: Sequence[int], *, seconds: bool = True) -> Iterator[Run]:
        """Train what has not been trained; yield each run that is there. All runs of a seed come together.

        seconds: whether each arm but b is also trained for as many CPU seconds as arm b took, where that one is done.
        """
        for seed in seeds:
            runs = [Run(arm, seed) for arm in arms]
            if seconds and (TIMED in arms or self.is_done(Run(TIMED, seed))):
                runs += [replace(run, seconds=True) for run in runs if run.arm != TIMED]
            for run in runs:
                if not self.is_done(run):
                    self._train(run)
                yield run

    def steps_of(self, run: Run) -> int:
        """Return how many optimizer steps a run has; of one by seconds its arm and arm b must be done by steps."""
        if not run.seconds:
            return self.sizes.steps
        each = self.cpu_seconds(replace(run, seconds=False)) / self.sizes.steps
        return max(1, round(self.cpu_seconds(Run(TIMED, run.seed)) / each))

    def cpu_seconds(self, run: Run) -> float:
        """Return the CPU seconds of a run's steps, rollouts included; start, saves and evaluation are not."""
        return float(sum(one["step/cpu_s"] for one in records_of(self.run_folder(run), "step")))

    def _write_pictures(self) -> None:
        if self.sizes.order:
            from bench.pays.shapes import write_pictures
        else:
            from bench.pays.pictures import write_pictures
        write_pictures(self.data, self.sizes)

    def _make_start(self) -> None:
        """Train the start. For digits the tower and stage 1 are trained twice: names fade while places are learnt."""
        sizes, data = self.sizes, self.data
        if sizes.order:
            from bench.pays.shapes import make_start

            make_start(self.model, sizes, self.folder / "start.unfinished")
            (self.folder / "start.unfinished").rename(self.start)
            return
        self._teach(self.model, "tower-1")
        self._stage1("places", places_config(sizes, self.folder / "tower-1", data, self.folder / "places-run"))
        self._teach(self.folder / "places", "tower-2")
        self._stage1("start", names_config(sizes, self.folder / "tower-2", data, self.folder / "start-run"))

    def _teach(self, model: Path, name: str) -> None:
        from bench.pays.tower import TowerLesson, teach_tower

        sizes, output = self.sizes, self.folder / name
        if not (output / "tower.json").exists():
            lesson = TowerLesson(sizes.tower_steps, sizes.tower_batch, sizes.tower_rate, sizes.pixels)
            teach_tower(model, self.data / "train.jsonl", output, lesson)

    def _stage1(self, name: str, config: Config) -> None:
        """Train a part of stage 1, and export it under a name."""
        if not (self.folder / name).exists():
            self._learn(name, config)
            last = Path(config["training"]["output_dir"]) / f"checkpoint-{config['training']['max_steps']}"
            _export(last, self.folder / name)

    def _train(self, run: Run) -> None:
        output = self.run_folder(run)
        shutil.rmtree(output, ignore_errors=True)
        arm, sizes = ARMS[run.arm], replace(self.sizes, steps=self.steps_of(run))
        self._learn(run.name, arm_config(arm, run.seed, sizes, self._beginning(arm, run.seed), self.data, output))
        self._answer(output / f"checkpoint-{sizes.steps}", output / ANSWERS)

    def _beginning(self, arm: Arm, seed: int) -> Path:
        """Return the model at which an arm begins; the arm that it comes after must be done."""
        if not arm.after:
            return self.start
        run = self.run_folder(Run(arm.after, seed))
        if not (run / EXPORTED).exists():
            _export(run / f"checkpoint-{self.sizes.steps}", run / EXPORTED)
        return run / EXPORTED

    def _learn(self, name: str, config: Config) -> None:
        path = self.folder / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        self.learn(parse_run_config(config))

    def sample(self, answers: int) -> None:
        """Let the start answer each held-out image several times, as far as it has not; the answers are sampled."""
        if not self.sampled_answers.exists():
            self._answer(self.start, self.sampled_answers, sampled=answers)

    def _answer(self, weights: Path, output: Path, *, sampled: int = 0) -> None:
        """Let weights answer the held-out images, all in the same way: greedily, or sampled so many times."""
        from stage2_trainer.learner.build import write_checkpoint_rollouts

        answering = sampling_config if sampled else answer_config
        config = parse_run_config(answering(self.sizes, self.start, self.data, self.folder / "answering"))
        unfinished = output.with_suffix(".unfinished")
        unfinished.unlink(missing_ok=True)
        write_checkpoint_rollouts(
            config, checked_records(config, world_size=1), [weights] * max(1, sampled), unfinished
        )
        unfinished.rename(output)


def _export(checkpoint: Path, output: Path) -> None:
    command = [sys.executable, "-m", "stage2_cli", "export", str(checkpoint), "--output", str(output)]
    subprocess.run(command, check=True)


def records_of(output: Path, event: str) -> list[dict[str, Any]]:
    """Return the records of a run's log of one kind; none where it has not begun."""
    path = output / "stage2_log.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [one for line in lines if (one := json.loads(line))["event"] == event]


def learn_here(config: RunConfig) -> None:
    """Train a configuration in this process: to begin a new one costs as much as a run here."""
    if config.rlhf is not None:
        from bench.pays.rewarded import learn_rewarded  # TRL takes seconds more

        learn_rewarded(config)
    elif code := main.learn(config):
        raise SystemExit(code)
