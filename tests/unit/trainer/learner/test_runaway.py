"""A run whose answers run away ends by its rule, with values, rule and way out, and leaves a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stage2_api.rollout_matching import Runaway
from stage2_trainer import main
from stage2_trainer.learner.step_record import RunawayWatch, bad_sample_stats
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.process.checkpoints import newest_whole
from stage2_trainer.rollouts.errors import RunawayError
from tests.unit.trainer.learner.harness import build, two_boxes
from tests.unit.trainer.learner.test_rollout_metrics import stats

RULE = Runaway(enabled=True, objects_per_truth=2.0, truncated_share=0.5, steps=2)
CALM = stats(gt_objects=2, valid_objects=3, dropped_invalid=1)  # 2 a true object: as many as are allowed
WILD = stats(gt_objects=2, valid_objects=4, dropped_invalid=1)
CUT = replace(CALM, truncated=True)


@pytest.mark.parametrize("steps", [[CALM] * 5, [WILD], [CUT, CALM, CUT, CALM]])
def test_what_is_within_the_limits_over_the_last_steps_goes_on(steps):
    watch = RunawayWatch(RULE)
    for step, one in enumerate(steps, 1):
        watch.note([one], step=step)


@pytest.mark.parametrize(
    ("steps", "key", "told"),
    [
        ([CALM, CALM, WILD], "objects_per_truth", "up to step 3, 2 answers have 9 objects for 4 true ones, 2.25 each"),
        ([CALM, CUT, CUT], "truncated_share", "2 answers 2 end within the JSON, a share of 1.00"),
    ],
)
def test_what_is_above_them_ends_the_run_with_key_values_and_way_out(steps, key, told):
    watch = RunawayWatch(RULE)
    for step, one in enumerate(steps[:-1], 1):
        watch.note([one], step=step)
    with pytest.raises(RunawayError) as error:
        watch.note([steps[-1]], step=len(steps))
    (problem,) = error.value.problems
    assert problem.path == f"custom.extra.rollout_matching.runaway.{key}"
    assert problem.value == getattr(RULE, key)
    assert told in str(problem)
    assert "supervised_share" in problem.way_out


def test_steps_without_rollouts_and_bad_samples_count_for_nothing():
    watch = RunawayWatch(RULE)
    for step in range(10):
        watch.note([replace(WILD, from_truth=True), bad_sample_stats()], step=step)
    watch.note([WILD, bad_sample_stats()], step=10)


def test_without_the_key_nothing_is_ended():
    watch = RunawayWatch(Runaway(steps=1))
    watch.note([CUT] * 100, step=1)


def test_a_run_that_is_ended_has_trained_its_step_and_leaves_it_in_a_checkpoint(tmp_path, model, encoder, image_paths):
    crowd = serialize_objects([GTObject("red box", "bbox", (i, i, i + 9, i + 9)) for i in range(9)])
    harness = build(tmp_path, model, encoder, two_boxes(image_paths), answer=lambda one: crowd, max_steps=9)
    harness.trainer.components = replace(harness.trainer.components, runaway=RunawayWatch(RULE))
    with pytest.raises(RunawayError):
        main._train(harness.trainer, None)
    assert harness.trainer.state.global_step == 2
    assert newest_whole(tmp_path).name == "checkpoint-2"
    assert RunawayError in main.MET_BY_ALL
