"""Training does something: the example job, as it is shipped, matches more of held-out images than before."""

from pathlib import Path

import pytest

from tests.integration import runs

pytestmark = pytest.mark.timeout(900)

HELD_OUT = 128
RISE = 0.08
"""About two standard errors of a fraction of the 190 objects in these images; the job's own rise is twice that."""


@pytest.fixture(scope="module")
def evaluations(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What the evaluations before the first and after the last step found; the job's seed is fixed in its file."""
    folder: Path = tmp_path_factory.mktemp("learning")
    runs.run_example(folder, train=480, held_out=HELD_OUT, training={"save_strategy": "no"})
    return [record for record in runs.records(folder) if record["event"] == "evaluation"]


def test_more_of_held_out_images_is_matched_after_training_than_before(evaluations: list[dict]) -> None:
    before, after = evaluations
    assert (before["step"], after["step"]) == (0, 30)
    assert after["eval_rollout_recall_iou50"] > before["eval_rollout_recall_iou50"] + RISE
    assert after["eval_rollout_f1_iou50"] > before["eval_rollout_f1_iou50"] + RISE


def test_answers_stay_whole(evaluations: list[dict]) -> None:
    assert evaluations[-1]["eval_rollout_parse_truncated_rate"] < 0.05
