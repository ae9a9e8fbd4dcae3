"""Rollouts become segments: prompt, what was kept and appended, the end of the turn, and where each is supervised."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.learner.estep import EStep, StepAnswers, Teaching
from stage2_trainer.learner.listeners import sample_document
from stage2_trainer.learner.supervise import Supervisor, sample_stats
from stage2_trainer.matching import supervision
from stage2_trainer.rollouts.rollout_source import Answers
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.harness import (
    RecordingPush,
    ScriptedBackend,
    build_e_step,
    fresh_rollouts,
    only_first,
    sample_tools,
    segments_of,
    shifted,
)


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


def test_segments_follow_order_of_records(e_step, records):
    segments, seen = e_step(only_first)
    assert [matched.record for matched in seen] == records
    assert [len(segment) for segment in segments] == [segment.stats.encoded_len for segment in segments]


def test_pipeline_requests_next_step_one_ahead_with_same_seeds(encoder, model, records):
    def run(*, pipelined):
        backend, segments = ScriptedBackend(encoder, records, only_first), []
        e_step = build_e_step(encoder, model, backend, lambda *_: None)
        for step in (0, 1, 3):  # the run resumes at 3, whose records nobody has asked for
            following = [records[step + 1 : step + 2]] if pipelined and step < 3 else ()
            batches = [records[step % 3 : step % 3 + 1]]
            answers = e_step.sync_and_request(batches, following, global_step=step, stopwatch=Stopwatch())
            segments += [segment for micro_step in answers.micro_steps() for segment in micro_step]
        return segments, backend.seeds

    ahead, asked_ahead = run(pipelined=True)
    plain, asked = run(pipelined=False)
    assert asked_ahead[:2] == asked[:2]
    assert asked_ahead[-1] == asked[-1]
    assert [one.sample_id for one in ahead] == [one.sample_id for one in plain]
    assert [one.stats.staleness for one in ahead] == [0, 1, 0]


class Slowing(RecordingPush):
    """A push that takes as many seconds as there were pushes."""

    def push(self, model, *, version):
        report = super().push(model, version=version)
        return report.model_copy(update={"seconds": float(len(self.versions))})


class LosesFirst(ScriptedBackend):
    """A backend whose first request loses its server."""

    def generate(self, requests, **options):
        self.plans.append(options["seed_plan"])
        if len(self.plans) == 1:
            raise ServerError("scripted", "rollout", "went away")
        return super().generate(requests, **options)


def test_step_reports_repeated_push_after_lost_server(encoder, model, records):
    backend = LosesFirst(encoder, records, only_first)
    rollouts = fresh_rollouts(backend, Slowing(), Reporter(), lambda error: None)
    e_step = EStep(model, Teaching(rollouts, Supervisor(sample_tools(encoder), model)))
    answers = e_step.sync_and_request([records[:1]], global_step=0, stopwatch=Stopwatch())
    assert len([*answers.micro_steps()]) == 1
    assert answers.report.seconds == 2


def test_missed_objects_are_appended_and_supervised(e_step, encoder, matcher):
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


def test_matched_coordinates_are_supervised_with_ground_truth(e_step, matcher):
    segment = e_step(shifted)[0][0]
    ids = segment.placed.encoding.input_ids.numpy()
    masks = supervision(segment.meta, ids, matcher.vocab)
    assert masks.coord_in_prefix.all()
    assert sorted(masks.coord_targets) == sorted([100, 100, 400, 400, 500, 500, 900, 800])
    written = matcher.vocab.bins_of(ids[masks.coord_positions])
    assert np.array_equal(written, masks.coord_targets + 30)


def test_prompt_tokens_that_differ_on_server_stop_run(e_step, encoder, records):
    class Other(ScriptedBackend):
        def _rollout(self, *asked):
            found = super()._rollout(*asked)
            return dataclasses.replace(found, prompt_token_ids=[*found.prompt_token_ids[:-1], 7])

    with pytest.raises(ConfigError, match="prompt tokenization mismatch"):
        e_step(only_first, Other(encoder, records, only_first))


def test_answer_is_cut_before_image_token(encoder, matcher, records):
    answer = encoder.tokenizer.encode('{"object_1": {"desc": "red box", "bbox_2d": [', add_special_tokens=False)
    image_token = encoder.processor.image_token_id
    matched = matcher.match(records[0], Rollout([1], [*answer, image_token, *answer], "", "s", 0, "stop"))
    assert image_token not in matched.target.y_train_ids
    assert sample_stats(matched).truncated


def test_sample_log_contains_predictions_and_matches(e_step):
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


class Numbers(StepAnswers):
    """Answers whose segments are their numbers."""

    def _segment(self, index):
        return index

    def _finish(self):
        pass


def test_each_answer_is_awaited_only_once():
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
