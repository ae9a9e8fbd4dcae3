"""Rollouts become segments: prompt, what was kept and appended, the end of the turn, and where each is supervised."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.learner.estep import StepAnswers
from stage2_trainer.learner.listeners import ParseFailureLog, sample_document
from stage2_trainer.learner.supervise import sample_stats
from stage2_trainer.matching import supervision
from stage2_trainer.rollouts.rollout_source import Answers
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.harness import ScriptedBackend, build_e_step, only_first, segments_of, shifted


@pytest.fixture
def e_step(encoder, model, records):
    def run(answer, backend=None):
        seen = []
        backend = backend or ScriptedBackend(encoder, records, answer)
        step = build_e_step(encoder, model, backend, lambda global_step, matched: seen.extend(matched))
        return segments_of(step, [records], global_step=2), seen

    return run


def text(encoder, ids):
    return encoder.tokenizer.decode(ids, skip_special_tokens=False)


def test_there_is_a_segment_for_each_record_in_order(e_step, records):
    segments, seen = e_step(only_first)
    assert [matched.record for matched in seen] == records
    assert [len(segment) for segment in segments] == [segment.stats.encoded_len for segment in segments]


def test_what_the_rollout_missed_is_appended_and_taught(e_step, encoder, matcher):
    segment = e_step(only_first)[0][0]
    ids = segment.placed.encoding.input_ids.numpy()
    masks = supervision(segment.meta, ids, matcher.vocab)
    assert text(encoder, ids).endswith(
        '"bbox_2d": ["<|coord_500|>", "<|coord_500|>", "<|coord_900|>", "<|coord_800|>"]}}<|im_end|>\n'
    )
    taught = text(encoder, ids[masks.labels >= 0])
    assert "object_2" in taught
    assert "blue" not in taught, "descriptions of appended objects are not taught"
    assert taught.endswith("<|im_end|>")


def test_matched_coordinates_are_taught_the_ground_truth(e_step, matcher):
    segment = e_step(shifted)[0][0]
    ids = segment.placed.encoding.input_ids.numpy()
    masks = supervision(segment.meta, ids, matcher.vocab)
    assert masks.coord_in_prefix.all()
    assert sorted(masks.coord_targets) == sorted([100, 100, 400, 400, 500, 500, 900, 800])
    written = matcher.vocab.bins_of(ids[masks.coord_positions])
    assert np.array_equal(written, masks.coord_targets + 30)


def test_a_prompt_that_the_server_saw_otherwise_stops_the_run(e_step, encoder, records):
    class Other(ScriptedBackend):
        def _rollout(self, *asked):
            found = super()._rollout(*asked)
            return dataclasses.replace(found, prompt_token_ids=[*found.prompt_token_ids[:-1], 7])

    with pytest.raises(ConfigError, match="prompt tokenization mismatch"):
        e_step(only_first, Other(encoder, records, only_first))


def test_an_answer_that_holds_an_image_token_is_cut_before_it(encoder, matcher, records):
    answer = encoder.tokenizer.encode('{"object_1": {"desc": "red box", "bbox_2d": [', add_special_tokens=False)
    image_token = encoder.processor.image_token_id
    matched = matcher.match(records[0], Rollout([1], [*answer, image_token, *answer], "", "s", 0, "stop"))
    assert image_token not in matched.target.y_train_ids
    assert sample_stats(matched).truncated


def test_a_sample_is_logged_with_its_matches(e_step):
    document = sample_document(e_step(shifted)[1][0])
    assert document["sample_id"] == "record-0"
    assert document["predictions"][0] == {
        "desc": "red box",
        "kind": "bbox",
        "bins": [130, 130, 430, 430],
        "matched": True,
    }
    assert document["pairs"][0]["iou"] > 0.6
    assert document["ground_truth"][1]["desc"] == "blue box"


def test_only_the_first_parse_failures_are_logged(matcher, records, caplog):
    caplog.set_level("INFO")
    broken = [matcher.match(one, Rollout([1], [300, 301], "", "s", 0, "stop")) for one in records]
    ParseFailureLog(2)(broken)
    assert [record.sample_id in caplog.text for record in records] == [True, True, False]


class Numbers(StepAnswers):
    """Answers whose segments are their numbers."""

    def _segment(self, index):
        return index

    def _finish(self):
        pass


def test_each_answer_is_awaited_at_the_same_cost_however_many_there_are():
    count, awaited, batch = 40, [], Future()

    class Counted(Answers):
        def wait_for(self, some, *, patience_s=None):
            awaited.extend(some)
            return super().wait_for(some, patience_s=patience_s)

    step = Numbers([[None]] * count, SimpleNamespace(supervisor=None), None, model=None, global_step=1)
    step._answers = Counted(lambda error, tries: batch)
    come = step.as_they_come()
    for index in reversed(range(1, count)):
        step._segments[index].set_result(None)
        assert next(come) == (index, index)
    batch.set_result(None)  # the last is not encoded yet
    assert [*come] == [(0, 0)]
    assert len(awaited) == count
