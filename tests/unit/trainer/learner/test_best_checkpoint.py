"""The best checkpoint is saved when it is found, whatever the save interval is, kept, and named."""

from __future__ import annotations

import json

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.preflight import checked_records
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import only_first, perfect

BY_STEP = {1: only_first, 2: perfect, 3: only_first, 4: only_first}


@pytest.fixture
def trained(make):
    """Four steps, an evaluation after each, of which the second is the best; step 4 is the only one to be saved."""
    harness = make(
        answer=lambda one: BY_STEP[max(1, harness.trainer.state.global_step)](one),
        max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=4, save_total_limit=1,
        metric_for_best_model="eval_rollout_f1",
    )  # fmt: skip
    harness.trainer.train()
    return harness


def test_it_is_there_beside_the_last_one(trained, tmp_path):
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


def test_log_and_progress_name_it(trained):
    best = trained.lines("best_checkpoint")
    assert [line["step"] for line in best] == [1, 2]
    assert best[-1] == {"event": "best_checkpoint", "step": 2, "metric": "eval_rollout_f1", "score": 1.0}
    current = trained.reporter.current
    assert (current.best_step, current.best_score) == (2, 1.0)


def test_a_metric_that_no_evaluation_has_is_refused_before_anything_starts(tmp_path):
    config = run_config(training={"metric_for_best_model": "eval_rollout_f1_clas", "eval_strategy": "steps"})
    with pytest.raises(ConfigError, match=r"training\.metric_for_best_model.*did you mean eval_rollout_f1"):
        checked_records(config, world_size=1)
