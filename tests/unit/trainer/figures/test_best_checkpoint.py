"""The best checkpoint is the one that finds most, and scores of different figures are not compared."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from transformers import TrainerState

from stage2_api.runconfig import BEST_METRIC
from stage2_trainer.matching import GTObject, MatchOptions, serialize_objects
from stage2_trainer.model import checkpoints
from stage2_trainer.model.best_checkpoint import FOLLOWING, forget_other_figure
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import build, only_first, perfect, two_boxes

RECOMMENDED = asdict(MatchOptions.from_config(run_config(matching={"recipe": "recommended"}).rollout_matching))
EVALUATED = {
    "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "save_strategy": "steps", "save_steps": 1,
    "learning_rate": 0.0,
}  # fmt: skip
F1 = "eval_rollout_f1"


@pytest.fixture
def model(model):
    from stage2_trainer.model.transformers_compat import disable_cache

    disable_cache(model)
    return model


def far(one):
    """Answer with as many boxes as there are true ones, none of which overlaps any."""
    return serialize_objects([GTObject(o.desc, o.kind, (0, 900 + i, 9, 909 + i)) for i, o in enumerate(one.objects)])


@pytest.fixture
def run(tmp_path, model, encoder, image_paths):
    """A function that trains with answers that depend on the step; returns the harness."""

    def train(by_step, records=None, checkpoint=None, **options):
        harness = build(
            tmp_path, model, encoder, records or two_boxes(image_paths),
            answer=lambda one: by_step[harness.learner.state.global_step](one),
            max_steps=len(by_step) - 1, matching=RECOMMENDED, **{**EVALUATED, **options},
        )  # fmt: skip
        harness.learner.train(checkpoint)
        return harness

    return train


@pytest.mark.parametrize("metric", [BEST_METRIC, F1, "rollout_f1_iou50"])
def test_best_checkpoint_has_highest_f1_after_steps_with_f1_zero(run, metric, tmp_path):
    assert RECOMMENDED["assignment"] == "dynamic"
    harness = run([far, far, only_first, perfect, far], metric_for_best_model=metric)
    evaluations = {one["step"]: one for one in harness.lines("evaluation")}
    scores = {step: [one[key] for key in (F1, BEST_METRIC)] for step, one in evaluations.items()}
    assert scores == {0: [0, 0], 1: [0, 0], 2: [2 / 3, 2 / 3], 3: [1, 1], 4: [0, 0]}
    assert [one[FOLLOWING] for one in evaluations.values()] == [6, 6, 0, 0, 6]
    assert [one["rollout/f1"] for one in harness.lines("step")] == pytest.approx([0, 0, 2 / 3, 1])
    assert [one["rollout/following"] for one in harness.lines("step")] == [6, 6, 0, 0]
    assert checkpoints.best_whole(tmp_path) == tmp_path / "checkpoint-3"
    assert harness.lines("best_checkpoint")[-1]["score"] == 1
    status = harness.reporter.current
    assert (status.best_step, status.best_score) == (3, 1)


def test_null_f1_is_never_best_score_and_does_not_fail_run(run, image_paths, tmp_path):
    """No record has an object, and for three steps no answer has one."""
    empty = [replace(one, objects=()) for one in two_boxes(image_paths)]
    nothing, wrong = (lambda one: "{}"), lambda one: serialize_objects([GTObject("cat", "bbox", (0, 0, 9, 9))])
    harness = run([nothing, nothing, wrong, nothing], empty, metric_for_best_model=F1)
    assert [one[F1] for one in harness.lines("evaluation")] == [None, None, 0, None]
    assert [one["rollout/f1"] for one in harness.lines("step")] == [None, None, 0]
    assert [one["step"] for one in harness.lines("best_checkpoint")] == [2]
    logged = [value for one in harness.learner.state.log_history for value in one.values()]
    assert None not in logged, "trackers get no null"


def resumed(tmp_path, run, metric, change=None):
    """Resume from the checkpoint of step 2, after a change of its state; step 3 is half right, and so is step 4."""
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = TrainerState.load_from_json(str(path))
    if change is not None:
        change(state)
    state.save_to_json(str(path))
    (path.parent / checkpoints.MANIFEST).unlink()
    by_step = [far, far, perfect, only_first, only_first]
    return run(by_step, metric_for_best_model=metric, checkpoint=path.parent)


def test_resumed_run_keeps_its_best_score(run, tmp_path, caplog):
    run([far, only_first, perfect], metric_for_best_model=F1)
    harness = resumed(tmp_path, run, F1)
    assert (harness.learner.state.best_global_step, harness.learner.state.best_metric) == (2, 1)
    assert "cannot be compared" not in caplog.text


@pytest.mark.parametrize(
    ("started_with", "change"),
    [
        ("eval_rollout_pred_objects", None),
        (F1, lambda state: [one.pop(FOLLOWING, None) for one in state.log_history]),
    ],
    ids=["another figure", "a figure that counted boxes that follow"],
)
def test_resumed_run_forgets_best_score_of_another_metric_with_warning(started_with, change, run, tmp_path, caplog):
    run([far, only_first, perfect], metric_for_best_model=started_with)
    harness = resumed(tmp_path, run, F1, change=change)
    best = "6 at step 2" if change is None else "1 at step 2"
    assert (
        f"training.metric_for_best_model: the best score so far, {best}, is not one of {F1} as it is counted now, so"
        " the two cannot be compared; the best checkpoint is chosen anew from here on"
    ) in caplog.text
    state = harness.learner.state
    assert (state.best_global_step, state.best_metric) == (3, pytest.approx(2 / 3)), "the best since the resume"
    assert [one["step"] for one in harness.lines("best_checkpoint") if one["score"] == pytest.approx(2 / 3)][-1] == 3


def state_of(**changes):
    log = [{"step": 4, F1: 0.9, BEST_METRIC: 0.1, FOLLOWING: 3.0}]
    return TrainerState(**{"best_metric": 0.9, "best_global_step": 4, "log_history": log, **changes})


@pytest.mark.parametrize(
    ("metric", "state", "kept"),
    [
        (F1, state_of(), True),
        ("rollout_f1", state_of(), True),
        (F1, state_of(log_history=[{"step": 4, F1: 0.9}]), False),
        ("rollout_fn", state_of(log_history=[{"step": 4, "eval_rollout_fn": 0.9}]), False),
        (BEST_METRIC, state_of(best_metric=0.1, log_history=[{"step": 4, F1: 0.9, BEST_METRIC: 0.1}]), True),
        (BEST_METRIC, state_of(), False),
        (F1, state_of(log_history=[]), False),
        (BEST_METRIC, state_of(best_metric=0.0, best_global_step=None), False),
        (None, state_of(), True),
    ],
)
def test_best_score_is_kept_only_if_evaluation_logged_it_for_same_metric(metric, state, kept):
    forget_other_figure(SimpleNamespace(metric_for_best_model=metric), state)
    assert (state.best_metric is not None) == kept
    assert (state.best_model_checkpoint, state.best_global_step is not None) == (None, kept)
