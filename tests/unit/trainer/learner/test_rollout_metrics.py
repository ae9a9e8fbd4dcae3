"""Figures follow from counts; nothing divides by zero; evaluation, `stage2 evaluate` and the page report the same."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from stage2_api.coordinates import coord_token
from stage2_report.held_out import read_evaluations
from stage2_trainer.data.records import load_records
from stage2_trainer.learner.evaluate import METRICS, Evaluation, answer_metrics
from stage2_trainer.learner.listeners import log_held_out_rollouts
from stage2_trainer.learner.step_record import SampleStats, evaluation_metrics, rollout_metrics
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

GOOD = SampleStats(
    prompt_len=50, generated=40, valid_objects=3, gt_objects=2, matched=2, supervised=1, maskiou_sum=1.2,
    matched_iou50=1, gating_rejections=3, fn_appended=1, prefix_coord_targets=4, append_len=20, tail_ignored=5,
    drafted=60, accepted=30,
)  # fmt: skip
BAD = SampleStats(
    prompt_len=50, generated=10, truncated=True, dropped_invalid=1, gt_objects=2, fn_appended=2, append_len=40
)


def test_a_steps_figures_follow_from_the_counts():
    found = rollout_metrics([GOOD, BAD], top_k=5, generate_s=2.0)
    expected = {
        "parse_truncated_rate": 0.5,
        "parse_obj_total": 4,
        "parse_obj_valid_frac": 0.75,
        "sample_valid_pred_rate": 0.5,
        "precision": 1 / 3,
        "recall": 1 / 4,
        "f1": 2 / 7,
        "fp": 2,
        "fn": 3,
        "fn_per_sample": 1.5,
        "fn_appended": 3,
        "match_rate": 0.5,
        "excluded_rate": 0.5,
        "matched_maskiou_mean": 0.6,
        "recall_iou50": 1 / 4,
        "f1_iou50": 2 / 7,
        "gating_rejection_rate": 3 / 15,
        "prefix_coord_targets_per_matched": 4,
        "tail_ignore_frac": 5 / 60,
        "gen_new_tokens_total": 50,
        "gen_tokens_per_s": 25,
        "decode_steps_per_token": 20 / 50,
        "draft_acceptance_rate": 0.5,
        "prompt_len_mean": 50,
    }
    assert {name: found[f"rollout/{name}"] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("samples", [[], [SampleStats()]])
def test_no_objects_give_zeros_and_not_errors(samples):
    found = rollout_metrics(samples, top_k=5, generate_s=0.0)
    assert all(math.isfinite(value) for value in found.values())
    assert found["rollout/f1"] == 0


def test_an_evaluation_has_its_own_names():
    found = evaluation_metrics([GOOD, BAD], top_k=5)
    assert found["rollout_f1"] == pytest.approx(2 / 7)
    assert {name.removeprefix("rollout_") for name in found} == {
        "precision", "recall", "f1", "pred_objects", "gt_objects", "matched", "fp", "fn", "gating_rejections",
        "parse_dropped_invalid", "parse_truncated_rate", "sample_valid_pred_rate",
        "sample_any_match_rate", "matched_maskiou_mean", "recall_iou50", "f1_iou50", "ended_by_repetition",
        "ended_by_length", "decode_steps_per_token", "draft_acceptance_rate",
    }  # fmt: skip


def test_an_answer_at_the_token_limit_is_no_answer_that_was_cut_for_a_row():
    at_limit, cut = replace(GOOD, at_limit=True), replace(GOOD, cut=True)
    found = rollout_metrics([at_limit, at_limit, cut], top_k=5, generate_s=1.0)
    assert (found["rollout/ended_by_length"], found["rollout/overlong_cut"]) == (2, 1)
    assert evaluation_metrics([at_limit, cut, cut], top_k=5)["rollout_ended_by_length"] == 1


def test_objects_for_each_true_one_count_broken_ones_too():
    assert rollout_metrics([GOOD, BAD], top_k=5, generate_s=1.0)["rollout/objects_per_truth"] == 1.0  # 3 + 1 of 4


def test_a_stopwatch_adds_up_by_name():
    watch = Stopwatch()
    for _ in range(2):
        before = watch.seconds.get("a", 0.0)
        with watch.measure("a"):
            sum(range(1000))
        assert watch.seconds["a"] > before


def test_beams_are_counted_apart():
    found = rollout_metrics([GOOD, replace(GOOD, beam=True), GOOD], top_k=5, generate_s=1.0)
    assert (found["rollout/decode_greedy"], found["rollout/decode_beam"]) == (2, 1)


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
def test_evaluation_command_and_page_say_the_same(tmp_path, model, encoder, image_paths, answer):
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


def test_an_evaluation_of_nothing_has_figures():
    assert set(answer_metrics([], {}).values()) == {0.0}
