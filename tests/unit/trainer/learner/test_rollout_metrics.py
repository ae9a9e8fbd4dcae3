"""Evaluation, `stage2 evaluate` and the page report the same."""

from __future__ import annotations

import numpy as np
import pytest

from stage2_api.coordinates import coord_token
from stage2_report.held_out import read_evaluations
from stage2_trainer.data.records import load_records
from stage2_trainer.learner.evaluate import METRICS, Evaluation, answer_metrics
from stage2_trainer.learner.listeners import log_held_out_rollouts
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.scores.answer_file import read_rollouts
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.rollout_file import Rollouts, places_in
from stage2_trainer.scores.scored_image import scored_images
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import JsonLines, SilentLog
from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.learner.harness import RecordingPush, ScriptedBackend, fresh_rollouts, perfect, sample_tools
from tests.unit.trainer.scores.scenes import box, write_data


def test_stopwatch_adds_up_seconds_by_name():
    watch = Stopwatch()
    for _ in range(2):
        before = watch.seconds.get("a", 0.0)
        with watch.measure("a"):
            sum(range(1000))
        assert watch.seconds["a"] > before


TRUTHS = [
    [box("red box", 100, 100, 400, 400), box("blue box", 500, 500, 900, 800)],
    [box("red box", 100, 100, 400, 400), box("red box", 0, 500, 300, 800)],
    [box("blue box", 0, 0, 300, 300)],
]


def wrong(record):
    """A wrong name, an object moved, one twice, one unknown; the last answer is cut off."""
    first, *others = record.objects
    answered = [GTObject("blue box", "bbox", first.bins), *others, *others, box("unicorn", 0, 0, 90, 90)]
    text = serialize_objects(answered)
    return text[:-30] if record.index == 2 else text


@pytest.mark.parametrize("answer", [perfect, wrong])
def test_evaluation_command_and_page_report_same_scores(tmp_path, model, encoder, image_paths, answer):
    crowds = [{"desc": "unicorn", "bbox_2d": [coord_token(bin_) for bin_ in (0, 0, 90, 90)]}]
    data = write_data(tmp_path, TRUTHS, sample_ids=["a", "b", "c"], images=image_paths, crowds=crowds)
    records = load_records(data)
    rollouts = JsonLines(tmp_path / "rollouts.jsonl")
    evaluation = Evaluation(
        tools=sample_tools(encoder),
        rollouts=fresh_rollouts(
            ScriptedBackend(encoder, records, answer), RecordingPush(), Reporter(), lambda error: None
        ),
        batch_size=2,
        on_matched=log_held_out_rollouts(SilentLog(), rollouts, lambda step, answers: None),
    )
    learner = evaluation(records[::-1], model, global_step=4)
    rollouts.close()
    answered = read_rollouts(Rollouts(tmp_path / "rollouts.jsonl", 4), records, places_in(data))
    offline = AnswerScores.from_images(scored_images(records, answered.answers)).figures(np.ones(3))
    page = read_evaluations(tmp_path / "stage2_log.jsonl", {4})[4].scores.figures(np.ones(3))
    logged = {name: learner[f"rollout_{name}"] for name in METRICS.values()}
    assert logged == {name: offline[source] for source, name in METRICS.items()}
    assert logged == {name: page[source] for source, name in METRICS.items()}
    assert learner["rollout_f1_class_iou50"] == (1.0 if answer is perfect else pytest.approx(6 / 12))


def test_evaluation_without_answers_has_null_scores():
    found = answer_metrics([], {})
    assert found.pop("rollout_duplicates") == 0
    assert set(found.values()) == {None}
