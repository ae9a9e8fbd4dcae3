"""Answers too long for a row: cut after whole objects, skipped, or refused."""

from __future__ import annotations

import json

import pytest

from stage2_trainer.learner.rows import PackedRowPlanner, StepRowPlanner
from stage2_trainer.learner.supervise import OverlongRule
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.packing import PackingError
from stage2_trainer.rollouts.replay import replay
from tests.unit.trainer.learner.harness import box, build, perfect, record

ROW = 200


def loop(one):
    """Answer truly, and go on with objects that are not there."""
    ghosts = [GTObject("ghost", "bbox", (900, 900, 901 + i, 901 + i)) for i in range(8)]
    return serialize_objects([*one.ground_truth.objects, *ghosts])


def first_loops(one):
    return loop(one) if one.index == 0 else perfect(one)


@pytest.fixture
def make(tmp_path, model, encoder, image_paths):
    def run(what, *, rows=None, objects=1, answer=first_loops):
        boxes = {f"object_{i + 1}": box("red box", 100, 100, 400, 400 + i) for i in range(objects)}
        records = [record(path, i, **(boxes if i == 0 else {"object_1": boxes["object_1"]}))
                   for i, path in enumerate(image_paths)]  # fmt: skip
        harness = build(tmp_path, model, encoder, records, answer=answer, rows=rows or StepRowPlanner(ROW),
                        overlong=OverlongRule(ROW, what))  # fmt: skip
        harness.train()
        return harness.matched, harness.lines("step")[-1]

    return run


def test_an_answer_is_cut_after_as_many_objects_as_fit(make, encoder):
    seen, told = make("cut")
    (cut,) = [one for one in seen if one.kept is not None]
    assert (told["rollout/overlong_cut"], told["rollout/overlong_skipped"]) == (1, 0)
    objects = json.loads(cut.target.y_train_text)
    assert 1 < len(objects) < 9
    assert objects["object_1"]["desc"] == "red box"
    prompt, ends = len(cut.rollout.prompt_token_ids), len(encoder.end_of_turn_ids)
    length = prompt + cut.target.train_len + ends
    one_object = (cut.target.train_len - 2) // len(objects)
    assert ROW - one_object - 4 <= length <= ROW


def test_a_cut_answer_can_be_replayed(make, encoder):
    from stage2_trainer.learner.listeners import rollout_document

    seen, _ = make("cut")
    lines = [rollout_document(one) for one in seen]
    assert sum("kept_tokens" in line for line in lines) == 1
    assert all(one.same for one in replay(lines, encoder.tokenizer))


@pytest.mark.parametrize("rows", [None, PackedRowPlanner(ROW, capacity=8, min_fill=0.1)])
def test_nothing_of_a_skipped_answer_is_trained_on(make, rows):
    seen, told = make("skip", rows=rows)
    assert [one.skipped for one in sorted(seen, key=lambda one: one.record.index)] == [True, False, False]
    assert told["rollout/overlong_skipped"] == 1


def test_a_sample_whose_true_objects_alone_are_too_long_is_skipped(make):
    _, told = make("cut", objects=8, answer=perfect)
    assert (told["rollout/overlong_cut"], told["rollout/overlong_skipped"]) == (0, 1)


def test_an_overlong_answer_is_refused_where_that_is_asked_for(make):
    with pytest.raises(PackingError, match="post_rollout_overlong"):
        make("error")
