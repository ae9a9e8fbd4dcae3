"""Every figure of samples is what its oracle says, on each hand-made step and however processes share its samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stage2_trainer.learner.step_record import StepRecord, evaluation_metrics, rollout_metrics, server_drafts
from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.figures.hand_made import BAD, MATCHED, MISSED, SILENCE, STEPS, TOP_K, Step
from tests.unit.trainer.figures.oracles import OF_AN_EVALUATION, OF_SAMPLES


def differences(found, expected):
    """The figures that differ: (found, expected) by name."""
    assert found.keys() >= expected.keys(), expected.keys() - found.keys()
    return {
        name: (found[name], value)
        for name, value in expected.items()
        if found[name] != (None if value is None else pytest.approx(value))
    }


@pytest.mark.parametrize("name", STEPS)
def test_step_metrics_equal_oracles(name):
    step = Step(STEPS[name])
    found = rollout_metrics([one.stats() for one in step.all], top_k=TOP_K, generate_s=step.seconds)
    assert found.keys() == OF_SAMPLES.keys()
    assert differences(found, {key: oracle(step) for key, oracle in OF_SAMPLES.items()}) == {}
    assert [key for key, value in found.items() if value is not None and value < 0] == []


@pytest.mark.parametrize("name", STEPS)
def test_evaluation_metrics_equal_step_metrics(name):
    step = Step([one for one in STEPS[name] if not (one.bad or one.skipped)])
    found = evaluation_metrics([one.stats() for one in step.all], top_k=TOP_K)
    assert found.keys() == OF_AN_EVALUATION.keys()
    assert differences(found, {key: OF_SAMPLES[of](step) for key, of in OF_AN_EVALUATION.items()}) == {}


def test_evaluation_counts_matches_of_sample_that_training_skips():
    found = evaluation_metrics([replace(MATCHED, skipped=True).stats()], top_k=TOP_K)
    assert (found["rollout_matched"], found["rollout_f1"]) == (2, 1.0)


def test_draft_metrics_of_each_server_equal_hand_counts():
    """MATCHED has five drafts of eight tokens, with 0, 6, 8, 8 and 8 accepted; MISSED two of two, with 1 and 1."""
    also = replace(MISSED, drafted=4, accepted=2, verified=(0, 2, 0))
    undrafted = replace(SILENCE, server="another")
    step = Step([MATCHED, also, replace(MATCHED, server="b"), undrafted, BAD])
    another, other, both = server_drafts([one.stats() for one in step.all])
    tokens = len(MATCHED.matched().rollout.token_ids), len(also.matched().rollout.token_ids)
    at_b = [4 / 5] * 6 + [3 / 5] * 2
    rates = {"draft_acceptance_rate": 30 / 40, "accepted_by_position": pytest.approx(at_b)}
    counts = {"tokens": tokens[0], "drafted": 40, "accepted": 30, "verified": [1, 0, 0, 0, 0, 0, 1, 0, 3]}
    assert other == {"server": "b", **counts, "decode_steps_per_token": (tokens[0] - 30) / tokens[0], **rates}
    assert both == {
        "server": "server",
        "tokens": sum(tokens),
        "drafted": 44,
        "accepted": 32,
        "verified": [1, 2, 0, 0, 0, 0, 1, 0, 3],
        "decode_steps_per_token": (sum(tokens) - 32) / sum(tokens),
        "draft_acceptance_rate": 32 / 44,
        "accepted_by_position": pytest.approx([6 / 7] + [4 / 7] * 5 + [3 / 7] * 2),
    }
    nothing = dict.fromkeys(("decode_steps_per_token", "draft_acceptance_rate", "accepted_by_position"))
    silent = {"tokens": len(SILENCE.matched().rollout.token_ids), "drafted": 0, "accepted": 0, "verified": []}
    assert another == {"server": "another", **silent, **nothing}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("first", [0, 1, 5])
def test_metrics_of_several_processes_equal_metrics_of_one_process(name, first):
    step = Step(STEPS[name])
    records = []
    for share, seconds in ((step.all[:first], 0.5), (step.all[first:], step.seconds)):
        watch = Stopwatch()
        watch.seconds["rollout_generate"] = seconds  # the slowest process counts
        records.append(StepRecord(stopwatch=watch, samples=[one.stats() for one in share]))
    found = StepRecord.joined(records).figures(top_k=TOP_K)
    assert differences(found, {key: oracle(step) for key, oracle in OF_SAMPLES.items()}) == {}
