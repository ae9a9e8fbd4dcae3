"""Steps of stage 1 between those of stage 2: which they are, that they ask for nothing, and that they are counted."""

from __future__ import annotations

import pytest

from stage2_trainer.learner.estep import SupervisedSteps
from stage2_trainer.telemetry.log_keys import SUPERVISED
from tests.unit.trainer.learner.harness import build, only_first, two_boxes


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", [0, 17, 42])
def test_every_stretch_of_steps_has_its_share(share, seed):
    steps = SupervisedSteps(share, seed)
    chosen = [step in steps for step in range(400)]
    assert [steps.before(step) for step in range(401)] == [sum(chosen[:step]) for step in range(401)]
    for start in range(0, 300, 7):
        assert abs(sum(chosen[start : start + 100]) - 100 * share) <= 1


def test_the_seed_says_which_they_are_and_nothing_else_does():
    chosen = {seed: [step in SupervisedSteps(0.25, seed) for step in range(40)] for seed in range(12)}
    assert chosen[3] == [step in SupervisedSteps(0.25, 3) for step in range(40)]
    assert len({tuple(one) for one in chosen.values()}) > 1


def test_a_step_on_the_ground_truth_asks_for_nothing_and_is_counted(tmp_path, model, encoder, image_paths):
    steps = SupervisedSteps(0.5, 17)
    records = two_boxes(image_paths)
    harness = build(tmp_path, model, encoder, records, answer=only_first, supervised={"steps": steps}, max_steps=4)
    harness.train()
    told = harness.lines("step")
    on_truth = [step in steps for step in range(4)]
    assert sum(on_truth) == 2
    assert ["supervised/objects" in one for one in told] == on_truth
    assert ["rollout/f1" in one for one in told] == [not one for one in on_truth]
    assert [one["supervised/steps_total"] for one in told] == [sum(on_truth[: i + 1]) for i in range(4)]
    assert harness.sync.versions == [step for step in range(4) if not on_truth[step]]
    assert len(harness.backend.seeds) == 2 * len(records)
    first = told[on_truth.index(True)]
    assert set(SUPERVISED) <= set(first)
    assert first["supervised/objects"] == 2 * len(records)
