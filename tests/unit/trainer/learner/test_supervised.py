"""Stage 1, alone and between steps of stage 2: its loss is the model's own on the ground truth, which is never cut."""

from __future__ import annotations

import json

import pytest
import torch

from stage2_trainer.learner.estep import GroundTruthSteps
from stage2_trainer.learner.rows import StepRowPlanner
from stage2_trainer.learner.supervise import OverlongRule
from stage2_trainer.matching import serialize_objects
from tests.unit.trainer.learner.harness import PROMPTS, box, build, only_first, record, two_boxes
from tests.unit.trainer.log_page import explained

ROW = 400
NEVER_PLANNED = "window"  # in the names of keys that another scope writes


@pytest.fixture
def train(tmp_path, model, encoder):
    def run(records, *, row=ROW, coord_loss=True, shuffled_by=None, **options):
        rule = OverlongRule(row, "skip")
        chosen = {"coord_loss": coord_loss, "shuffled_by": shuffled_by}
        harness = build(tmp_path, model, encoder, records, rows=StepRowPlanner(row), overlong=rule, supervised=chosen,
                        answer=None, **options)  # fmt: skip
        logged = {line.pop("event"): line for line in harness.train()}
        return harness, {**logged, "answers": [one.target.y_train_text for one in harness.matched]}

    return run


def own_loss(model, encoder, records):
    """The mean over answers and their ends of transformers' own loss, sequence by sequence."""
    total, count = 0.0, 0
    for one in records:
        answer = encoder.tokenizer.encode(serialize_objects(one.ground_truth.objects), add_special_tokens=False)
        found = encoder.teacher_forced(encoder.prompt(PROMPTS.chat(one)), answer)
        labels = found.input_ids.clone()
        labels[: found.prompt_len] = -100
        labels[found.prompt_len + len(answer) + 1 :] = -100  # the end of turn is one token, and a line break
        inputs = {"input_ids": found.input_ids[None], "mm_token_type_ids": found.mm_token_type_ids[None]}
        pixels = {"pixel_values": found.pixel_values, "image_grid_thw": found.image_grid_thw}
        with torch.no_grad():
            loss = model(**inputs, **pixels, labels=labels[None]).loss
        total, count = total + float(loss) * (len(answer) + 1), count + len(answer) + 1
    return total / count


def test_loss_without_coordinate_term_equals_transformers_loss(train, model, encoder, image_paths):
    records = two_boxes(image_paths)
    expected = own_loss(model, encoder, records)
    _, logged = train(records, coord_loss=False)
    assert logged["step"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert logged["step"]["loss/coord"] is None, "coordinates are text like any other"


def test_coordinate_loss_is_separate_from_loss_of_descriptions(train, model, encoder, image_paths):
    records = two_boxes(image_paths)
    whole = own_loss(model, encoder, records)
    _, logged = train(records)
    assert logged["step"]["loss/coord"] > 0
    assert 0 < logged["step"]["loss/ce"] < whole  # the coordinates are the hard part
    assert logged["step"]["supervised/objects"] == 2 * len(records)


def test_stage_1_requests_no_rollouts_and_pushes_no_weights(train, image_paths):
    harness, _ = train(two_boxes(image_paths))
    assert (harness.backend.plans, harness.sync.versions) == ([], [])


def test_logged_stage_1_keys_equal_documented_keys(train, image_paths):
    _, logged = train(two_boxes(image_paths))
    sections = ("Loss", "Where the step's wall time went", "Time by task", "Packing", "Stage 1", "Bad samples")
    keys = {key for key in explained(*sections) if NEVER_PLANNED not in key}
    assert sorted(logged["step"].keys() - {"step"}) == sorted({*keys, "memory/peak_bytes"})


def test_ground_truth_too_long_for_row_is_skipped(train, image_paths):
    many = {f"object_{i}": box("red box", i, i, 400, 400) for i in range(1, 20)}
    records = [record(image_paths[0], 0, **many), *two_boxes(image_paths[1:])]
    _, logged = train(records, row=200)
    assert logged["step"]["supervised/overlong_skipped"] == 1
    assert logged["step"]["supervised/objects"] == 2 * (len(records) - 1)
    assert logged["step"]["supervised/objects_per_sample"] == 2
    assert logged["step"]["supervised/train_len_p90"] < 200, "of what was trained on"


def test_sample_with_unreadable_image_is_set_aside(train, image_paths, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    _, logged = train([*two_boxes(image_paths[1:]), record(str(broken), 7, object_1=box("cat", 1, 2, 3, 4))])
    assert logged["step"]["bad_samples"] == 1
    assert logged["step"]["supervised/objects"] == 4
    assert logged["bad_sample"]["sample_id"] == "record-7"


def test_record_without_objects_trains_empty_answer(train, model, encoder, image_paths):
    empty = [record(image_paths[0])]
    expected = own_loss(model, encoder, empty)
    _, logged = train(empty)
    assert logged["step"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_object_shuffle_differs_each_time_and_is_reproducible_by_seed(train, image_paths):
    many = {f"object_{i}": box(f"box {i}", i, i, 400, 400) for i in range(1, 9)}
    runs = [
        train([record(image_paths[0], 0, **many)], row=900, shuffled_by=seed, max_steps=2)[1]["answers"]
        for seed in (1, 1, 2)
    ]
    orders = [[[o["desc"] for o in json.loads(answer).values()] for answer in answers] for answers in runs]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][0] != orders[0][1]
    assert {tuple(sorted(order)) for run in orders for order in run} == {tuple(f"box {i}" for i in range(1, 9))}


def test_objects_keep_record_order_without_shuffling(train, image_paths):
    records = two_boxes(image_paths)
    _, logged = train(records)
    assert logged["answers"] == [serialize_objects(one.ground_truth.objects) for one in records]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", [0, 17, 42])
def test_ground_truth_steps_are_spread_evenly_by_share(share, seed):
    steps = GroundTruthSteps(share, seed)
    chosen = [step in steps for step in range(400)]
    assert [steps.before(step) for step in range(401)] == [sum(chosen[:step]) for step in range(401)]
    for start in range(0, 300, 7):
        assert abs(sum(chosen[start : start + 100]) - 100 * share) <= 1


def test_ground_truth_steps_are_reproducible_by_seed():
    chosen = {seed: [step in GroundTruthSteps(0.25, seed) for step in range(40)] for seed in range(12)}
    assert chosen[3] == [step in GroundTruthSteps(0.25, 3) for step in range(40)]
    assert len({tuple(one) for one in chosen.values()}) > 1


def test_ground_truth_step_requests_no_rollouts_and_is_counted(tmp_path, model, encoder, image_paths):
    steps = GroundTruthSteps(0.5, 17)
    records = two_boxes(image_paths)
    harness = build(tmp_path, model, encoder, records, answer=only_first, supervised={"steps": steps}, max_steps=4)
    harness.train()
    logged = harness.lines("step")
    on_truth = [step in steps for step in range(4)]
    assert sum(on_truth) == 2
    assert ["supervised/objects" in one for one in logged] == on_truth
    assert ["rollout/f1" in one for one in logged] == [not one for one in on_truth]
    assert [one["supervised/steps_total"] for one in logged] == [sum(on_truth[: i + 1]) for i in range(4)]
    assert harness.sync.versions == [step for step in range(4) if not on_truth[step]]
    assert len(harness.backend.seeds) == 2 * len(records)
    first = logged[on_truth.index(True)]
    assert explained("Stage 1") <= set(first)
    assert first["supervised/objects"] == 2 * len(records)
