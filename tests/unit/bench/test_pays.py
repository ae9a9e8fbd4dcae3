"""The comparison of stage 1 and stage 2: equal terms, each run once, and figures of what has run."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from bench.pays import arms, findings, study
from bench.pays.arms import ARMS, Sizes, arm_config
from PIL import Image

from stage2_api.parsing import parse_run_config
from stage2_trainer import main

SIZES = Sizes(steps=2, batch=1, train=2, held_out=2)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A study of two images whose arms train two steps, and the configurations that it has trained."""
    monkeypatch.setattr(arms, "ANSWER", 24)
    trained = []

    def learn(path: Path) -> None:
        trained.append(path.stem)
        assert main.learn(parse_run_config(yaml.safe_load(path.read_text()))) == 0

    found = study.Study(tmp_path, SIZES, learn)
    found.data.mkdir(parents=True)
    found.start.symlink_to(study.MODEL)
    box = {"desc": "one", "bbox_2d": [100, 100, 400, 400]}
    for part in ("train", "val"):
        images = [f"{part}-{k}.png" for k in range(2)]
        for k, name in enumerate(images):
            Image.new("RGB", (96, 96), (80 * k, 40, 90)).save(found.data / name)
        lines = [{"images": [one], "width": 96, "height": 96, "units": "bins", "objects": [box]} for one in images]
        (found.data / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return found, trained


def test_every_arm_runs_once_from_one_start_and_has_its_figures(small):
    one, trained = small
    one.prepare()  # data and start are there
    assert list(one.run(ARMS, [1])) == list(one.run(ARMS, [1])) == [(arm, 1) for arm in ARMS]
    assert trained == [f"{arm}-1" for arm in ARMS]
    first = {tuple(_answers(one.run_folder(arm, 1), step=0)) for arm in ARMS}
    assert len(first) == 1
    found = findings.findings(one, draws=20)
    assert [(name, told["seeds"]) for name, told in found["arms"].items()] == [(arm, [1]) for arm in ARMS]
    assert found["arms"]["b"]["against_a"]["seeds"] == [1]
    assert len(list(findings.table(found))) == 2 + 1 + len(ARMS) + 2


def _answers(folder: Path, step: int) -> list[str]:
    lines = map(json.loads, (folder / "rollouts.jsonl").read_text().splitlines())
    return [line["text"] for line in lines if (line["part"], line["step"]) == ("held-out", step)]


def test_arms_differ_in_their_trainer_and_targets_alone():
    def terms(name: str) -> dict:
        config = arm_config(ARMS[name], 1, SIZES, Path("start"), Path("data"), Path("out"))
        config["custom"].pop("trainer_variant")
        for key in ARMS[name].matching:
            config["custom"]["extra"]["rollout_matching"].pop(key)
        return config

    assert terms("a") == terms("b") == terms("c")
    decoding = {"temperature", "repetition_penalty", "max_new_tokens"}
    assert not any(decoding & set(arm.matching) for arm in ARMS.values())


def test_a_run_without_its_last_evaluation_is_not_done(tmp_path):
    assert not study.is_done(tmp_path, 2)
    events = [{"event": "evaluation", "step": 0}, {"event": "step", "step": 2}]
    (tmp_path / "stage2_log.jsonl").write_text("\n".join(map(json.dumps, events)))
    assert not study.is_done(tmp_path, 2)


class Constant:
    """Scores that are one value whatever is drawn."""

    def __init__(self, value: float):
        self.images, self._value = range(3), value

    def figures(self, weights):
        return dict.fromkeys(findings.FIGURES, self._value)

    def drawn(self, resamples):
        return {name: np.full(len(resamples), self._value) for name in findings.FIGURES}


def test_an_interval_holds_what_seeds_differ_by():
    scores = {1: Constant(0.2), 2: Constant(0.4), 3: Constant(0.6)}
    drawn = findings._drawn(scores, np.ones((400, 3)), seed=0)
    found = findings._figures(scores, drawn)
    assert found["figures"]["AP"] == pytest.approx(0.4)
    low, high = found["intervals"]["AP"]
    assert 0.15 < low < 0.3 < 0.5 < high < 0.65


def test_a_difference_is_drawn_with_the_same_seeds_in_both():
    every = {"a": {1: Constant(0.2), 2: Constant(0.6)}, "b": {1: Constant(0.3), 2: Constant(0.7)}}
    drawn = {arm: findings._drawn(scores, np.ones((50, 3)), seed=0) for arm, scores in every.items()}
    found = findings._against(every, drawn, "b")
    assert found["intervals"]["AP"] == pytest.approx([0.1, 0.1])
