"""Recovered misses in whole steps: packed, reused, made ahead, and never in an evaluation."""

from __future__ import annotations

import pytest

from stage2_trainer.learner.rows import PackedRowPlanner, SingleRowPlanner, StepRowPlanner
from stage2_trainer.wire.requests import FurtherAnswers
from tests.unit.trainer.learner.harness import ScriptedBackend, build, only_first, perfect

ROUNDING = 2e-5  # float32, another order of additions
TWO = FurtherAnswers(2, 0.7)


@pytest.fixture
def stepped(tmp_path, model, encoder, records):
    """A function that trains a step with weights that stay, and returns its record and the backend that answered."""

    def run(*further, asked=TWO, **options):
        model.zero_grad()
        backend = ScriptedBackend(encoder, records, only_first, further=further)
        still = {"learning_rate": 0.0, "max_grad_norm": 0.0, **options}
        harness = build(tmp_path, model, encoder, records, backend=backend, further=asked, **still)
        harness.train()
        return harness.lines("step"), backend

    return run


FIGURES = ("loss", "loss/ce", "loss/coord", "loss/coord_prefix", "loss/coord_tail", "grad_norm")


def figures_of(step):
    return {name: step[name] for name in FIGURES}


def test_further_answers_that_find_nothing_change_nothing(stepped):
    plain = stepped(asked=None)[0][-1]
    found = stepped(only_first, only_first)[0][-1]
    assert figures_of(found) == figures_of(plain)
    assert (found["rollout/misses_recovered"], plain["rollout/gen_further_tokens_total"]) == (0, 0)


def test_what_they_find_weighs_twice(stepped):
    plain = stepped(asked=None)[0][-1]
    found = stepped(only_first, perfect)[0][-1]
    assert found["rollout/misses_recovered"] == found["rollout/fn_appended"] == 3
    assert found["rollout/gen_further_tokens_total"] > found["rollout/gen_new_tokens_total"]
    # All coordinates of the tail are those of recovered objects, none of the prefix.
    assert found["loss/coord_tail"] == pytest.approx(2 * plain["loss/coord_tail"], rel=ROUNDING)
    assert found["loss/coord_prefix"] == plain["loss/coord_prefix"]
    assert plain["loss/ce"] < found["loss/ce"] < 2 * plain["loss/ce"]  # the end of the answer has no factor


@pytest.mark.parametrize("rows", [PackedRowPlanner(600, capacity=8, min_fill=0.1), StepRowPlanner(600)])
def test_rows_do_not_matter(stepped, rows):
    single = stepped(perfect, perfect, rows=SingleRowPlanner())[0][-1]
    found = stepped(perfect, perfect, rows=rows)[0][-1]
    assert found["packing/post_rollout_segments"] == 3
    assert figures_of(found) == pytest.approx(figures_of(single), rel=ROUNDING)


def test_steps_that_train_again_on_a_rollout_keep_its_weights(stepped):
    steps, backend = stepped(perfect, perfect, m_steps=2, max_steps=2)
    first, again = steps[-2:]
    assert (first["rollout/buffer_reuse"], again["rollout/buffer_reuse"]) == (0, 1)
    assert figures_of(again) == figures_of(first)
    assert backend.asked_further == [2] * 3, "asked for once"


def test_a_pipeline_asks_for_them_ahead(stepped):
    steps, backend = stepped(perfect, perfect, pipelined=True, max_steps=2)
    assert [step["rollout/misses_recovered"] for step in steps[-2:]] == [3, 3]
    assert backend.asked_further == [2] * 6


def test_an_evaluation_asks_for_none(stepped):
    _, backend = stepped(perfect, perfect, eval_strategy="steps", eval_steps=1)
    assert backend.asked_further.count(2) == 3
    assert set(backend.asked_further) == {0, 2}
