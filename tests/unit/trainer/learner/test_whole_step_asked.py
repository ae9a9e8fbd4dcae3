"""Rollouts of a whole optimizer step, asked for at once: the same answers and targets as one micro-step at a time."""

from __future__ import annotations

import pytest

from stage2_trainer.learner.listeners import rollout_document
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.rollouts.replay import lines_of_step, replay
from stage2_trainer.rollouts.rollout_source import GenerationRequest
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import request_seed
from tests.unit.trainer.learner.harness import (
    PROMPTS,
    RecordingPush,
    ScriptedBackend,
    build_e_step,
    fresh_rollouts,
    only_first,
    perfect,
    segments_of,
    shifted,
    trained_ids,
    two_boxes,
)

STEP = 5
SIZES = (2, 1, 3)


class SampledBackend(ScriptedBackend):
    """Answers by the seed of each request, as sampling does."""

    def generate(self, requests, *, seed_plan, version=None, on_rollout=None, expected=()):
        found = []
        for index, request in enumerate(requests):
            seed = seed_plan.seed(index)
            self.seeds.append(seed)
            self.answer = (perfect, only_first, shifted)[seed % 3]
            found.append(self._rollout(request, version or 0))
        return found


@pytest.fixture
def records(image_paths):
    return two_boxes([image_paths[i % 3] for i in range(sum(SIZES))])


@pytest.fixture
def backend(encoder, records):
    return SampledBackend(encoder, records, perfect)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def e_step(encoder, model, backend, lines):
    return build_e_step(
        encoder,
        model,
        backend,
        lambda step, matched: lines.extend(
            {"event": "rollout", "part": "train", "step": step, **rollout_document(one)} for one in matched
        ),
    )


def batches(records):
    return [records[0:2], records[2:3], records[3:6]]


def test_whole_step_request_gives_same_answers_and_targets_as_single_micro_steps(
    e_step, lines, encoder, records, backend, model
):
    segments = segments_of(e_step, batches(records), global_step=STEP)
    together, backend.seeds = backend.seeds, []
    source = fresh_rollouts(backend, RecordingPush(), Reporter(), lambda error: None)
    alone = []
    for micro_step, batch in enumerate(batches(records)):
        chats = [PROMPTS.chat(one) for one in batch]
        alone += source.generate(GenerationRequest(model, chats, STEP, micro_step, Stopwatch())).rollouts
    expected = [request_seed(17, STEP, m, i) for m, size in enumerate(SIZES) for i in range(size)]
    assert together == backend.seeds == expected
    assert [line["token_ids"] for line in lines] == [one.token_ids for one in alone]
    assert len({tuple(line["token_ids"]) for line in lines}) > 1, "answers differ by their seeds"
    found = replay(lines_of_step(lines, STEP), encoder.tokenizer)
    assert [list(one.target.y_train_ids) for one in found] == [trained_ids(one) for one in segments]
    assert [(line["micro_step"], line["index"]) for line in lines] == [
        (m, i) for m, size in enumerate(SIZES) for i in range(size)
    ]
    assert [line["seed_base"] for line in lines[:3]] == [*expected[:1] * 2, expected[2]]


def test_interrupted_run_does_not_wait_for_answers(encoder, records, backend, model):
    def stop():
        raise Interrupted("asked to stop")

    e_step = build_e_step(encoder, model, backend, lambda step, matched: None, check=stop)
    answers = e_step.sync_and_request(batches(records), global_step=STEP, stopwatch=Stopwatch())
    answers._answers.result()
    answers._answers = _Never()
    with pytest.raises(Interrupted):
        next(answers.micro_steps())


class _Never:
    all_arrived = False

    def wait_for(self, some, *, patience_s=None):
        return False


def test_waiting_segment_is_saved_without_pixels(e_step, records, tmp_path):
    from stage2_trainer.learner.rows import load_waiting, save_waiting

    (segment,) = segments_of(e_step, [records[:1]], global_step=STEP)
    save_waiting(tmp_path, [segment])
    (found,) = load_waiting(tmp_path)
    assert found.placed.encoding.pixel_values is None
    assert found.images == records[0].images
