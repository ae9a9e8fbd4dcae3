"""Figures that do not follow from samples: losses, rows, times, weights, descriptions, stage 1, reuse, evaluations.

Each is compared with what a person computes for hand-made records of two processes, or measures beside a real run.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import GroundTruthSteps
from stage2_trainer.learner.evaluate import answer_metrics
from stage2_trainer.learner.listeners import sample_document
from stage2_trainer.learner.loss import LossFigures
from stage2_trainer.learner.step_record import SampleStats, StepRecord
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.scores.scored_image import read_answer
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import PARTS, ServerTime, StepTime, Stopwatch
from tests.unit.trainer.figures.hand_made import (
    DOG,
    FAR,
    FOUND_AND_FOLLOWED,
    TOP_K,
)
from tests.unit.trainer.figures.oracles import OF_AN_EVALUATION, OF_SAMPLES
from tests.unit.trainer.figures.test_figures_of_samples import differences
from tests.unit.trainer.learner.harness import build, only_first, two_boxes
from tests.unit.trainer.log_page import PAGE


def losses(total, ce, coord, *, prefix=(), tail=(), tokens=0):
    values = torch.tensor([total, ce, coord, sum(prefix), sum(tail)], dtype=torch.float64)
    return LossFigures(values, tokens, len(prefix), len(tail))


def record_of(*, seconds, passes, rows, wall, servers, cpu, **parts):
    """A record of one process."""
    watch = Stopwatch()
    watch.seconds |= seconds
    time = StepTime(wall, {**dict.fromkeys(PARTS, 0.0), **parts}, servers, cpu)
    return StepRecord(watch, losses=passes, rows=rows, time=time)


def row(fill, tokens, segments, waiting, **window):
    names = ("post_rollout_fill", "post_rollout_selected_total_len", "post_rollout_segments", "post_rollout_buffer")
    return {f"packing/{name}": value for name, value in zip(names, (fill, tokens, segments, waiting), strict=True)} | {
        f"packing/{name}": value for name, value in window.items()
    }


WINDOW = {"post_rollout_scope_window": 1.0, "window_fill": 0.75, "window_total_len": 150.0, "window_segments": 3.0}
FIRST = record_of(
    seconds={"rollout_generate": 2.0, "forward": 3.0, "mask_build": 0.25},
    passes=[losses(6.0, 2.0, 4.0, prefix=[3.0, 5.0], tokens=4), losses(1.0, 1.0, 0.0, tokens=2)],
    rows=[row(0.5, 50.0, 1.0, 2.0, **WINDOW), row(1.0, 100.0, 2.0, 0.0, **WINDOW)],
    wall=10.0, cpu=8.0, generate=2.0, forward=3.0, backward=4.0, optimizer=1.0,
    servers=[ServerTime("a", 0.5, 3.0), ServerTime("b", 0.25, 1.0)],
)  # fmt: skip
SECOND = record_of(
    seconds={"rollout_generate": 1.0, "forward": 5.0, "rollout_parse_match": 0.5, "post_rollout_pack": 0.125},
    passes=[losses(2.0, 0.0, 2.0, prefix=[1.0], tail=[3.0])], rows=[row(0.75, 75.0, 3.0, 1.0)], wall=10.0, cpu=4.0,
    wait=3.5, reward=0.5, forward=5.0, other=1.0, servers=[ServerTime("a", 0.75, 2.0), ServerTime("b", 0.0, 0.0)],
)  # fmt: skip
PHASES = {"connect": 0.5, "begin": 0.25, "pack": 1.0, "send": 2.0, "load": 1.0, "finish": 0.125, "prove": 3.0}
PUSH = SyncReport.create(
    7, 5.0, ["a", "b"], bytes=10, wire_bytes=8_000_000_000, phase_seconds=PHASES, transport="nccl", merge="server",
    merge_reason="it pays", rounding_kept=0.9, proof_gap=0.01,
)  # fmt: skip
OF_RECORDS = {
    "loss": (6 + 1 + 2) / 3,
    "loss/ce": (2 + 1 + 0) / 3,
    "loss/coord": (4 + 0 + 2) / 3,
    "loss/coord_prefix": (3 + 5 + 1) / 3,
    "loss/coord_tail": 3.0,
    "packing/post_rollout_fill": (0.5 + 1.0 + 0.75) / 3,
    "packing/post_rollout_selected_total_len": (50 + 100 + 75) / 3,
    "packing/post_rollout_segments": (1 + 2 + 3) / 3,
    "packing/post_rollout_buffer": (2 + 0 + 1) / 3,
    "packing/post_rollout_scope_window": 1.0,
    "packing/window_fill": 0.75,
    "packing/window_total_len": 150.0,
    "packing/window_segments": 3.0,
    "time/rollout_generate_s": max(2.0, 1.0),
    "time/rollout_parse_match_s": max(0.0, 0.5),
    "time/rollout_teacher_encode_s": 0.0,
    "time/post_rollout_pack_s": 0.125,
    "time/mask_build_s": 0.25,
    "time/forward_s": max(3.0, 5.0),
    "step/wall_s": 10.0,
    "step/cpu_s": (8 + 4) / 2,
    "step/generate_s": (2 + 0) / 2,
    "step/wait_s": (0 + 3.5) / 2,
    "step/reward_s": (0 + 0.5) / 2,
    "step/encode_s": 0.0,
    "step/match_s": 0.0,
    "step/pack_s": 0.0,
    "step/forward_s": (3 + 5) / 2,
    "step/backward_s": (4 + 0) / 2,
    "step/optimizer_s": (1 + 0) / 2,
    "step/sync_s": 0.0,
    "step/log_s": 0.0,
    "step/other_s": (0 + 1) / 2,
    "step/learner_idle_share": 1 - (4 + 2 + 0.5) / 10,
    "step/server_busy_share": (max(0.5, 0.75) + max(0.25, 0.0)) / 2,
    "step/server_in_flight": ((3 + 2) + (1 + 0)) / 2,
    "sync/version": 7.0,
    "sync/seconds": 5.0,
    "sync/bytes": 10.0,
    "sync/wire_bytes": 8e9,
    "sync/gigabytes_per_second": 8 / (1 + 2 + 1),
    **{f"sync/{phase}_s": seconds for phase, seconds in PHASES.items()},
    "sync/rounding_kept": 0.9,
    "sync/proof_gap": 0.01,
}
WORDS = {"sync/transport": "nccl", "sync/merge": "server", "sync/merge_reason": "it pays"}
OF_NOTHING = {
    "rollout/gen_tokens_per_s": None,
    "step/learner_idle_share": None,
    "step/server_busy_share": None,
    "step/server_in_flight": None,
    "sync/gigabytes_per_second": None,
    "sync/rounding_kept": None,
    "sync/proof_gap": None,
    "sync/seconds": 0.0,
    "sync/bytes": 0.0,
}


def test_step_metrics_joined_from_two_processes_match_hand_computed_values():
    joined = StepRecord.joined([replace(FIRST, sync=PUSH, version=7), replace(SECOND, sync=None, version=7)])
    assert differences(joined.figures(top_k=TOP_K), OF_RECORDS) == {}
    assert joined.words() == WORDS


def test_step_without_servers_pushes_or_passes_logs_no_metrics_of_them():
    found = StepRecord().figures(top_k=TOP_K)
    assert differences(found, OF_NOTHING) == {}
    assert "loss" not in found


TRUTH = [
    SampleStats(from_truth=True, prompt_len=10, train_len=30, encoded_len=41, gt_objects=3),
    SampleStats(from_truth=True, prompt_len=20, train_len=10, encoded_len=31, gt_objects=1),
    SampleStats(from_truth=True, prompt_len=30, gt_objects=90, skipped=True),
    SampleStats(bad=True),
]
OF_STAGE_1 = {
    "supervised/objects": 3 + 1,
    "supervised/objects_per_sample": (3 + 1) / 2,
    "supervised/prompt_len_mean": (10 + 20 + 30) / 3,
    "supervised/train_len_mean": (30 + 10) / 2,
    "supervised/encoded_len_mean": (41 + 31) / 2,
    "supervised/prompt_len_p90": 20 + 0.8 * (30 - 20),
    "supervised/train_len_p90": 10 + 0.9 * (30 - 10),
    "supervised/encoded_len_p90": 31 + 0.9 * (41 - 31),
    "supervised/overlong_skipped": 1,
    "bad_samples": 1,
}


def test_stage_1_metrics_cover_only_trained_samples():
    found = StepRecord(samples=TRUTH).figures(top_k=TOP_K)
    assert differences(found, OF_STAGE_1) == {}
    assert not any(key.startswith(("rollout/", "sync/")) for key in found)
    nothing = StepRecord(samples=TRUTH[2:]).figures(top_k=TOP_K)
    of_trained = [key for key in OF_STAGE_1 if key.startswith("supervised/") and ("train" in key or "encoded" in key)]
    assert {nothing[key] for key in (*of_trained, "supervised/objects_per_sample")} == {None}


def test_rollout_line_separates_matched_from_following_predictions():
    line = sample_document(FOUND_AND_FOLLOWED.matched())
    assert line["pairs"] == [{"prediction": 1, "ground_truth": 0, "iou": 1.0}]
    assert line["following"] == [{"prediction": 0, "ground_truth": 1, "iou": 0.0}]
    assert [one["matched"] for one in line["predictions"]] == [False, True, False]


class Measured:
    """What a step leaves in the learner, measured beside it when the optimizer steps."""

    def __init__(self, learner):
        self.norms, self.rates = [], []
        learner.engine.optimizer.optimizer.register_step_pre_hook(self.measure)

    def measure(self, optimizer, *_):
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        squares = [one.double().square().sum() for one in gradients]
        self.norms.append(float(torch.stack(squares).sum().sqrt()))
        self.rates.append(optimizer.param_groups[0]["lr"])


OF_A_RUN = {
    "grad_norm", "learning_rate", "bad_samples", "bad_samples_total", "memory/peak_bytes", "servers", "drafts",
    "supervised/steps_total", "rollout/buffer_reuse", "rollout/buffer_window_step0", "rollout/buffer_completed_steps",
}  # fmt: skip


@pytest.fixture
def model(model):
    from stage2_trainer.model.transformers_compat import disable_cache

    disable_cache(model)
    return model


def test_logged_run_metrics_equal_independent_measurements(tmp_path, model, encoder, image_paths):
    records = [replace(one, images=("gone.png",)) if one.index == 2 else one for one in two_boxes(image_paths)]
    run = build(tmp_path, model, encoder, records, answer=only_first, m_steps=2, max_steps=4, max_grad_norm=1e9)
    measured = Measured(run.learner)
    run.train()
    steps = run.lines("step")
    assert [one["grad_norm"] for one in steps] == pytest.approx(measured.norms, rel=1e-4)
    assert [one["learning_rate"] for one in steps] == pytest.approx(measured.rates)
    assert [one["rollout/buffer_reuse"] for one in steps] == [0, 1, 0, 1]
    assert [one["rollout/buffer_window_step0"] for one in steps] == [0, 0, 2, 2]
    assert [one["rollout/buffer_completed_steps"] for one in steps] == [0, 1, 0, 1]
    assert [(one["bad_samples"], one["bad_samples_total"]) for one in steps] == [(1, 1)] * 4
    assert [one["rollout/gen_tokens_per_s"] is None for one in steps] == [False, True, False, True]
    assert len({one["rollout/gen_new_tokens_total"] for one in steps}) == 1, "the counts of the rollouts in use"
    assert all(one["memory/peak_bytes"] > 1e8 and one["servers"] == [] for one in steps)
    nothing = dict.fromkeys(("decode_steps_per_token", "draft_acceptance_rate", "accepted_by_position"))
    for step in steps:
        (drafts,) = step["drafts"]
        tokens = step["rollout/gen_new_tokens_total"]
        assert drafts == nothing | {
            "server": drafts["server"], "tokens": tokens, "drafted": 0, "accepted": 0, "verified": [],
        }  # fmt: skip
    status = run.reporter.current
    assert (status.step, status.loss, status.tokens_per_second) == (4, steps[-1]["loss"], None)


def test_ground_truth_steps_are_counted(tmp_path, model, encoder, image_paths):
    steps = GroundTruthSteps(0.5, seed=3)
    run = build(tmp_path, model, encoder, two_boxes(image_paths), supervised={"steps": steps}, max_steps=4)
    logged = [one for one in run.train() if one["event"] == "step"]
    on_truth = ["supervised/objects" in one for one in logged]
    assert on_truth.count(True) == 2
    assert [one["supervised/steps_total"] for one in logged] == [sum(on_truth[: n + 1]) for n in range(4)]


LEFT, RIGHT = GTObject("cat", "bbox", (0, 0, 100, 100)), GTObject("cat", "bbox", (500, 0, 700, 100))
SCORED = [
    ([LEFT, RIGHT], serialize_objects([LEFT, LEFT])),  # one right, one of its duplicates, one missed
    ([LEFT, DOG], serialize_objects([LEFT, replace(DOG, desc="fox"), FAR])),  # one right, one misnamed, one wrong
    ([], "{}"),
    ([LEFT], serialize_objects([LEFT, RIGHT, RIGHT, RIGHT])[:-1]),  # one right, one wrong three times, cut off
]
OF_ANSWERS = {
    # 4 cats, answered in this order: right, repeated, right, right, three times wrong. So precision is 1 at the recalls
    # 0 to 0.25, 3/4 to 0.75, and 0 beyond; the one dog is not answered as such
    **dict.fromkeys(("ap", "ap50", "ap75"), (26 * 1.0 + 50 * 0.75 + 25 * 0.0) / 101 / 2),
    "ar": (3 / 4 + 0) / 2,
    "f1_class_iou50": 2 * 3 / (9 + 5),
    "precision_class_iou50": 3 / 9,
    "recall_class_iou50": 3 / 5,
    "desc_exact": 3 / 4,
    "duplicates": 1 + 2,
    "objects_per_truth": 9 / 5,
    "counting_error": (0 + 1 + 0 + 3) / 4,
    "parse_rate": 3 / 4,
    "loop_rate": 1 / 4,
}


def scores(cases):
    records = [Record(place, f"{place}", ("a.png",), 1000, 1000, tuple(true)) for place, (true, _) in enumerate(cases)]
    return answer_metrics(records, {place: read_answer(text) for place, (_, text) in enumerate(cases)})


OF_EMPTY = {name: 0 if name in ("duplicates", "counting_error", "loop_rate") else None for name in OF_ANSWERS}


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        (SCORED, OF_ANSWERS),
        ([([], "{}")], {**OF_EMPTY, "parse_rate": 1}),
        (
            [([], serialize_objects([LEFT]))],
            {**OF_EMPTY, "parse_rate": 1, "f1_class_iou50": 0, "precision_class_iou50": 0, "counting_error": 1},
        ),
        ([], {**OF_EMPTY, **dict.fromkeys(("counting_error", "loop_rate", "parse_rate"))}),
    ],
    ids=["right and wrong", "nothing true, nothing answered", "nothing true, one answered", "no sample"],
)
def test_evaluation_scores_match_hand_computed_values(cases, expected):
    assert differences(scores(cases), {f"rollout_{name}": value for name, value in expected.items()}) == {}


OF_TIME = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_bad_samples"}


def test_evaluation_speed_counts_bad_samples_too(tmp_path, model, encoder, image_paths):
    records = [replace(one, images=("gone.png",)) if one.index == 1 else one for one in two_boxes(image_paths)]
    run = build(tmp_path, model, encoder, records)  # 3 records, 2 a batch
    found = run.learner.evaluate()
    assert found["eval_samples_per_second"] * found["eval_runtime"] == pytest.approx(3)
    assert found["eval_steps_per_second"] * found["eval_runtime"] == pytest.approx(2)
    assert (found["eval_bad_samples"], found["eval_rollout_gt_objects"]) == (1, 4)


def test_every_logged_metric_has_oracle():
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    listed = {key for one in sections for key in re.findall(r"^\| `([^`]+)` \|", one, re.MULTILINE)}
    known = {*OF_SAMPLES, *OF_RECORDS, *WORDS, *OF_STAGE_1, *OF_A_RUN, *OF_TIME}
    known |= {f"eval_{name}" for name in OF_AN_EVALUATION} | {f"eval_rollout_{name}" for name in OF_ANSWERS}
    assert listed == known
