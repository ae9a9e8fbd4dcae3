"""A run whose answers run away ends by its rule, with values, rule and way out, and leaves a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stage2_api.rollout_matching import Runaway
from stage2_trainer import main
from stage2_trainer.learner.runaway import RunawayWatch
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.model.checkpoints import newest_whole
from stage2_trainer.rollouts.errors import RunawayError
from tests.unit.trainer.learner.harness import build, two_boxes

RULE = Runaway(enabled=True, objects_per_truth=2.0, truncated_share=0.5, steps=2)
CALM = SampleStats(gt_objects=2, valid_objects=3, dropped_invalid=1)  # 2 a true object: as many as are allowed
GOOD = SampleStats(gt_objects=2, valid_objects=2)
WILD = SampleStats(gt_objects=2, valid_objects=4, dropped_invalid=1)
CUT = replace(CALM, truncated=True)


def problems_of(steps, rule=RULE):
    """Watch steps of these samples; what ends the run at one of them, if anything does."""
    watch = RunawayWatch(rule)
    try:
        for step, samples in enumerate(steps, 1):
            watch.note(samples, step=step)
    except RunawayError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    "steps",
    [
        [[CALM]] * 5,
        [[WILD]],
        [[CUT], [CALM], [CUT], [CALM]],
        [[replace(WILD, from_truth=True), SampleStats(bad=True)]] * 10 + [[WILD, SampleStats(bad=True)]],
    ],
    ids=["calm", "one step", "within both limits", "neither rollouts of stage 1 nor bad samples count"],
)
def test_run_within_runaway_limits_continues(steps):
    assert problems_of(steps) == ()


def test_disabled_runaway_rule_never_stops_run():
    assert problems_of([[CUT] * 100], Runaway(enabled=False, steps=1)) == ()


@pytest.mark.parametrize(
    ("steps", "key", "message"),
    [
        (
            [GOOD, GOOD, CALM, WILD],
            "objects_per_truth",
            "up to step 4, 2 answers have 9 objects for 4 true ones, 2.25 each (1.00 in the first ones)",
        ),
        ([CALM, CUT, CUT], "truncated_share", "2 of 2 answers end within the JSON, a share of 1.00 (0.50 in the"),
    ],
)
def test_run_above_runaway_limit_stops_with_key_values_and_advice(steps, key, message):
    assert problems_of([[one] for one in steps[:-1]]) == ()
    (problem,) = problems_of([[one] for one in steps])
    assert problem.path == f"custom.extra.rollout_matching.runaway.{key}"
    assert problem.value == getattr(RULE, key)
    assert message in str(problem)
    assert "supervised_share" in problem.way_out


def test_runaway_limit_counts_objects_when_there_is_no_ground_truth():
    nothing, some, wild = (SampleStats(valid_objects=number) for number in (0, 1, 75))
    assert problems_of([[some]] * 5) == ()
    (problem,) = problems_of([[nothing], [nothing], [wild]])
    assert problem.rule.endswith("2 answers have 75 objects for 0 true ones")


@pytest.mark.parametrize("steps", [[[CUT], [CUT]], [[CUT] * 2 + [CALM] * 2] * 3 + [[CUT] * 3 + [CALM] * 2]])
def test_run_of_malformed_answers_from_start_advises_stage_1(steps):
    (problem,) = problems_of(steps)
    assert "train stage 1 first" in problem.way_out


def test_resumed_run_of_malformed_answers_does_not_advise_stage_1():
    watch = RunawayWatch(RULE)
    watch.note([CUT], step=50)
    with pytest.raises(RunawayError) as ended:
        watch.note([CUT], step=51)
    assert "stage 1" not in ended.value.problems[0].way_out


def test_runaway_run_stops_after_saving_its_last_step(tmp_path, model, encoder, image_paths):
    crowd = serialize_objects([GTObject("red box", "bbox", (i, i, i + 9, i + 9)) for i in range(9)])
    records = two_boxes(image_paths)
    harness = build(tmp_path, model, encoder, records, answer=lambda one: crowd, max_steps=9, runaway=RULE)
    with pytest.raises(RunawayError):
        main._train(harness.learner, None)
    assert harness.learner.state.global_step == 2
    assert newest_whole(tmp_path).name == "checkpoint-2"
    assert RunawayError in main.MET_BY_ALL
