"""docs/log.md has every key that a run writes, and no other."""

from __future__ import annotations

import json

import pytest

from stage2_trainer.learner.rows import PackedRowPlanner, WindowRowPlanner
from stage2_trainer.model.transformers_compat import disable_cache
from stage2_trainer.telemetry.run_log import EVALUATION_KEYS
from tests.unit.trainer.learner.harness import box, build, record
from tests.unit.trainer.log_page import explained

OF_A_STEP = (
    "Loss", "Where the step's wall time went", "Time by task", "Packing", "Weights and memory", "Parsing", "Matching",
    "Lengths", "Generation", "Bad samples", "Reuse",
)  # fmt: skip


@pytest.fixture
def written(tmp_path, model, encoder, image_paths):
    """The last record of each event of a run that packs windows, reuses rollouts and evaluates."""
    disable_cache(model)
    records = [record(path, i, object_1=box("red box", 100, 100, 400, 400)) for i, path in enumerate(image_paths)]
    rows = WindowRowPlanner(400, window=1, partial=PackedRowPlanner(400, capacity=8, min_fill=0.1))
    options = {"m_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    build(tmp_path, model, encoder, records, rows=rows, **options).learner.train()
    lines = map(json.loads, (tmp_path / "stage2_log.jsonl").read_text().splitlines())
    return {line.pop("event"): line for line in lines}


@pytest.mark.parametrize(("event", "sections"), [("step", OF_A_STEP), ("evaluation", ("Keys of an `evaluation`",))])
def test_logged_keys_equal_documented_keys(written, event, sections):
    assert sorted(written[event].keys() - {"step"}) == sorted(explained(*sections))


def test_best_model_metrics_equal_logged_evaluation_keys(written):
    assert sorted(written["evaluation"].keys() - {"step"}) == sorted(EVALUATION_KEYS)
