"""The summary data set, and the warm-up answers for the tiny GRPO run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stage2_api.parsing import parse_job
from stage2_trainer.data.records import load_records
from stage2_trainer.grpo.loaded_rewards import load_rewards
from stage2_trainer.grpo.rewards import Sample
from stage2_trainer.grpo.task import Task, record_rules
from tests.unit.examples.conftest import EXAMPLES
from tiny_model.scenes import make_scene
from tiny_model.summaries import HEADER, CarelessAnnotator, summary, write

JOB = EXAMPLES / "job-grpo-6v2-tiny.yaml"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summaries")
    script = [sys.executable, str(EXAMPLES / "make_summaries.py"), str(folder), "--train", "12", "--held-out", "0"]
    subprocess.run(script, check=True, capture_output=True)
    return folder / "train.jsonl"


def test_correct_answer_gets_full_reward_in_tiny_job(train):
    config = parse_job(yaml.safe_load(JOB.read_text())).spec.config
    task, rlhf = Task.from_config(config), config.rlhf
    assert rlhf is not None
    rewards = load_rewards(rlhf.reward_funcs, rlhf.resolved_weights)
    for index, record in enumerate(load_records(train, rules=record_rules(config))):
        right = Sample(write(make_scene(7, "train", index, max_shapes=2)), record, task.contract)
        assert [reward(right) for reward in rewards] == [1.0] * len(rewards)
    assert sum(rlhf.resolved_weights) == pytest.approx(1.0)


def test_careless_annotator_omits_half_of_headers_and_guesses_half_of_colours():
    annotator = CarelessAnnotator(3)
    scenes = [make_scene(3, "train", index, max_shapes=1) for index in range(600)]
    answers = [annotator.write(scene) for scene in scenes]
    with_header = [answer.startswith(f"{HEADER}\n") for answer in answers]
    colours = [json.loads(answer.split("\n")[-1])["items"][0]["desc"] for answer in answers]
    right = [colour == scene.shapes[0].colour for colour, scene in zip(colours, scenes, strict=True)]
    assert sum(with_header) / 600 == pytest.approx(1 / 2, abs=0.08)
    assert sum(right) / 600 == pytest.approx(1 / 2 + 1 / 2 * 1 / 6, abs=0.08)


def test_shapes_are_counted_by_colour_and_kind():
    scene = next(s for s in (make_scene(7, "train", i, max_shapes=4) for i in range(500)) if _twins(s))
    counts = [count for item in summary(scene)["items"] for count in item["kind"].values()]
    assert sum(counts) == len(scene.shapes)
    assert max(counts) > 1


def _twins(scene):
    return len({(shape.colour, shape.kind) for shape in scene.shapes}) < len(scene.shapes)
