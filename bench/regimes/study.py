"""The runs of the study: data and start of a number, an arm's run from it, and its figures on held-out images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench.pays import arms as pays
from bench.pays.shapes import crowd
from bench.pays.study import learn_here, records_of
from bench.regimes.arms import ARMS, BIASED, BIASES, EARLY, REWARDED, SUPERVISED, Arm, Regime

from stage2_api.coordinates import coord_bin, coord_token
from stage2_api.parsing import parse_run_config
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.data.reading_order import Bounds, in_reading_order
from stage2_trainer.data.records import RecordRules, load_records
from stage2_trainer.matching import targets
from stage2_trainer.matching.assign import Matching, match_except
from stage2_trainer.matching.geometry import box_iou
from stage2_trainer.scores.answer_file import read_rollouts
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.image_counts import image_counts
from stage2_trainer.scores.rollout_file import Rollouts, places_in
from stage2_trainer.scores.scored_image import scored_images
from tiny_model.crowded import HELD_OUT

BASE = Path(__file__).parents[2] / "examples" / "tiny-unordered"
SMALL = 300 * 300  # of 1000 x 1000: about half of the shapes are smaller
DEVELOPMENT, CALIBRATION = 200, 50  # complete images for the choice of a step, and of a bias
REWARD = "labels.py"
FIGURES = (
    "f1@0.5", "f1_class@0.5", "precision@0.5", "recall@0.5", "desc_exact", "objects_per_truth", "truncated_rate",
    "duplicate_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """The runs of a regime from start `number`, which is also the seed of each run. Everything lies in a folder."""

    root: Path
    name: str
    regime: Regime
    number: int

    @cached_property
    def folder(self) -> Path:
        """Where data, start and runs lie."""
        return self.root / self.name / str(self.number)

    @property
    def data(self) -> Path:
        """The folder of `train.jsonl`, and of the complete `dev.jsonl` and `val.jsonl`."""
        return self.folder / "data"

    @property
    def start(self) -> Path:
        """The model at which all arms begin."""
        return self.folder / "start"

    def prepare(self) -> Mapping[str, Any] | None:
        """Make data and start; return the start's line, None where both are there."""
        if self.start.exists():
            return None
        self._write_data()
        steps = self.regime.start_steps
        sizes = replace(self.regime.sizes, steps=steps[-1], rate=self.regime.start_rate, batch=self.regime.start_batch)
        output = self.folder / "start-run"
        shutil.rmtree(output, ignore_errors=True)
        config = self._config(pays.Arm("", SUPERVISED, {}), sizes, BASE, output)
        config["training"] |= {"save_steps": steps[0], "save_total_limit": 100}
        learn_here(parse_run_config(config))
        checkpoints = [output / f"checkpoint-{step}" for step in steps]
        best = self._best(checkpoints)
        unfinished = self.folder / "start.unfinished"
        shutil.copytree(BASE, unfinished, dirs_exist_ok=True)
        shutil.copy(checkpoints[best] / "model.safetensors", unfinished)
        unfinished.rename(self.start)
        shutil.rmtree(output)
        return self._line("start", 0, 0.0, self._figures([self.start])[0], chosen=steps[best])

    def lines(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Run an arm; yield its line, and those of its quarters, best step and best bias where it has them."""
        arm, output = ARMS[name], self.folder / "runs" / name
        shutil.rmtree(output, ignore_errors=True)
        sizes = self.regime.sizes
        steps = round(sizes.steps * arm.steps)
        sizes = replace(sizes, steps=steps, rate=sizes.rate * arm.rate)
        config = self._config(pays.Arm(arm.what, arm.variant, arm.matching), sizes, self.start, output)
        config["custom"]["train_jsonl"] = str(self._annotated(arm))
        save = steps // 4 if arm.chosen or arm.quarters else steps
        config["training"] |= {"save_steps": save, "save_total_limit": 100}
        if arm.reward:
            config["rlhf"] |= {"reward_funcs": [f"{REWARD}:reward"], "reward_files": {REWARD: arm.reward}}
        with _cut() if arm.cut else _as_it_is():
            learn_here(parse_run_config(config))
        cpu_s = sum(one["step/cpu_s"] for one in records_of(output, "step"))
        last = output / f"checkpoint-{steps}"
        yield self._line(name, steps, cpu_s, self._figures([last])[0])
        if arm.chosen:
            yield from self._early(name, last, cpu_s)
        if arm.chosen or arm.biased:
            bias = self._best_bias(last)
            figures = self._figures([last], longer=[bias])[0]
            yield self._line(f"{name}, {BIASED}", steps, cpu_s, figures, chosen=bias)
        if arm.quarters:
            yield from self._quarters(name, last)
        shutil.rmtree(output)

    def _quarters(self, name: str, last: Path) -> Iterator[Mapping[str, Any]]:
        spent = [one["step/cpu_s"] for one in records_of(last.parent, "step")]
        steps = [len(spent) * part // 4 for part in (1, 2, 3)]
        every = self._figures([last.with_name(f"checkpoint-{one}") for one in steps])
        for step, figures in zip(steps, every, strict=True):
            yield self._line(f"{name}, {step} steps", step, sum(spent[:step]), figures)

    def _early(self, name: str, last: Path, cpu_s: float) -> Iterator[Mapping[str, Any]]:
        steps = int(last.name.rpartition("-")[2])
        quarters = [self.start, *(last.with_name(f"checkpoint-{steps * part // 4}") for part in (1, 2, 3)), last]
        best = self._best(quarters)
        figures = self._figures([quarters[best]])[0]
        yield self._line(f"{name}, {EARLY}", steps * best // 4, cpu_s, figures, chosen=best)

    def _best_bias(self, checkpoint: Path) -> float:
        scores = self._figures([checkpoint], "dev", CALIBRATION, longer=BIASES)
        return BIASES[max(range(len(BIASES)), key=lambda place: scores[place]["f1@0.5"])]

    def _best(self, checkpoints: Sequence[Path]) -> int:
        scores = [one["f1@0.5"] for one in self._figures(checkpoints, "dev", DEVELOPMENT)]
        return scores.index(max(scores))

    def _line(self, arm: str, steps: int, cpu_s: float, figures: Mapping[str, float], **rest: Any) -> dict[str, Any]:
        made = {"regime": self.name, "start": self.number, "arm": arm, "steps": steps, "cpu_s": round(cpu_s, 1)}
        return {**made, **figures, **rest}

    def _config(self, arm: pays.Arm, sizes: pays.Sizes, model: Path, output: Path) -> dict[str, Any]:
        found = pays.arm_config(arm, self.number, sizes, model, self.data, output)
        if arm.variant == REWARDED:
            found["training"]["learning_rate"] = sizes.rate
        return found

    def _write_data(self) -> None:
        sizes = self.regime.sizes
        complete = crowd(replace(sizes, unlabelled=0.0))
        parts = [(crowd(sizes), f"train-{self.number}", "train", sizes.train), (complete, "dev", "dev", DEVELOPMENT)]
        for look, part, name, count in [*parts, (complete, HELD_OUT, "val", sizes.held_out)]:
            for _ in look.write(self.data, part, f"{name}.jsonl", count):
                pass
        if self.regime.leaves_out:
            path = self.data / "train.jsonl"
            _write(path, [_without(self.regime.leaves_out, one) for one in _records(path)])

    def _annotated(self, arm: Arm) -> Path:
        """Return the file that an arm trains on; the start answers first where the best of its answers are taught."""
        path, count = self.data / "train.jsonl", self.regime.sizes.train
        if not (arm.best_of or arm.found_by):
            return path
        answers = arm.best_of or arm.found_by
        found = self.data / f"train-{'best' if arm.best_of else 'found'}-of-{answers}{'-longer' * arm.longer}.jsonl"
        if found.exists():
            return found
        temperature = pays.TEMPERATURE if answers > 1 else 0.0
        longer = [self._best_bias(self.start) if arm.longer else 0.0]
        rounds = self._scores([self.start] * answers, "train", count, temperature=temperature, longer=longer)
        images = [list(each) for each in zip(*(one.images for one in rounds), strict=True)]
        pairs = zip(_records(path), images, strict=True)
        if arm.best_of:
            taught = [{**one, "objects": _written(max(each, key=_rank)) or one["objects"]} for one, each in pairs]
        else:
            taught = [joined(one, [_written(image) for image in each]) for one, each in pairs]
        _write(found, taught)
        return found

    def _figures(
        self, checkpoints: Sequence[Path], part: str = "val", count: int = 0, *, longer: Sequence[float] = (0.0,)
    ) -> list[dict[str, float]]:
        scores = self._scores(checkpoints, part, count or self.regime.sizes.held_out, longer=longer)
        every = [one.figures(np.ones(len(one.images))) for one in scores]
        return [{name: round(float(one[name]), 4) for name in FIGURES} for one in every]

    def _scores(
        self,
        checkpoints: Sequence[Path],
        part: str,
        count: int,
        *,
        longer: Sequence[float] = (0.0,),
        temperature: float = 0.0,
    ) -> list[AnswerScores]:
        from stage2_trainer.learner.build import write_checkpoint_rollouts

        path, output = self.data / f"{part}.jsonl", self.folder / "answers.jsonl"
        output.unlink(missing_ok=True)
        found = pays.answer_config(
            self.regime.sizes, self.start if self.start.exists() else BASE, self.data, self.folder / "answering"
        )
        found["custom"] |= {"val_jsonl": str(path), "val_sample_limit": count}
        found["training"]["per_device_eval_batch_size"] = 100
        matching = found["custom"]["extra"]["rollout_matching"]
        matching |= {"rollout_generate_batch_size": 100, "temperature": temperature}
        config = parse_run_config(found)
        write_checkpoint_rollouts(config, checked_records(config, world_size=1), checkpoints, output, longer=longer)
        records = load_records(path, count, RecordRules(images_exist=False))
        rounds = range(len(checkpoints) * len(longer))
        read = [read_rollouts(Rollouts(output, one), records, places_in(path)[:count]) for one in rounds]
        return [AnswerScores.from_images(scored_images(records, one.answers)) for one in read]


def joined(record: Mapping[str, Any], answers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return a record with the boxes of answers that overlap none of its labels, in reading order.

    Of one answer each box joins; of several, a box joins where another answer has it too.
    """
    labels = list(record["objects"])
    found = [(number, one) for number, answer in enumerate(answers) for one in answer]
    for number, one in found:
        agreed = len(answers) == 1 or any(other != number and _overlap(one, box) >= 0.5 for other, box in found)
        if agreed and all(_overlap(one, label) < 0.3 for label in labels):
            labels.append(dict(one))
    ordered = in_reading_order(labels, lambda one: Bounds(*_bins(one)), lambda one: str(one["desc"]))
    return {**record, "objects": ordered}


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    boxes = [np.array([_bins(each)]) for each in (one, other)]
    return float(box_iou(*boxes)[0])


def _bins(one: Mapping[str, Any]) -> tuple[int, int, int, int]:
    left, top, right, bottom = (coord_bin(each) or 0 for each in one["bbox_2d"])
    return left, top, right, bottom


def _without(kind: str, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record without the objects of a kind; the first stays where all are of it."""
    labels = record["objects"]
    lacking = {"small": _is_small, "ellipses": _is_ellipse, "right": _is_right}[kind]
    return {**record, "objects": [one for one in labels if not lacking(one)] or labels[:1]}


def _is_small(one: Mapping[str, Any]) -> bool:
    left, top, right, bottom = _bins(one)
    return (right - left) * (bottom - top) < SMALL


def _is_ellipse(one: Mapping[str, Any]) -> bool:
    return str(one["desc"]).endswith("ellipse")


def _is_right(one: Mapping[str, Any]) -> bool:
    left, _, right, _ = _bins(one)
    return left + right > 1000


def _rank(image: Any) -> tuple[float, float]:
    counts = image_counts(image)
    return 2 * counts.class_right / max(1.0, counts.truth + counts.class_judged), counts.truth


def _is_box(left: int, top: int, right: int, bottom: int) -> bool:
    return left < right and top < bottom


def _written(image: Any) -> list[dict[str, Any]]:
    named = [one for one in image.answer.objects if "<|" not in one.desc]  # a broken name has the text of a token
    boxes = [one for one in named if one.kind == "bbox" and _is_box(*one.bins)]
    return [{"desc": one.desc, "bbox_2d": [coord_token(each) for each in one.bins]} for one in boxes]


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    unfinished.rename(path)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _cut() -> Iterator[None]:
    """Let targets keep the objects that begin an answer in the annotated order, and teach everything after them."""
    match = match_except

    def in_order(pred: Any, truth: Any, *rest: Any) -> Matching:
        found = match(pred, truth, *rest)
        by_pred = {pair.pred: pair for pair in found.pairs}
        kept = 0
        while kept in by_pred and by_pred[kept].gt == kept:
            kept += 1
        return replace(
            found,
            pairs=tuple(by_pred[one] for one in range(kept)),
            false_positives=tuple(range(kept, len(pred))),
            false_negatives=tuple(range(kept, len(truth))),
        )

    with patch.object(targets, "match_except", in_order):
        yield
