"""What is counted and written down of one sample."""

from types import SimpleNamespace

import pytest

from stage2_trainer.learner.supervise import TruthSupervisor, sample_stats, with_origin
from stage2_trainer.matching import MatchOptions
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Rollout, SeedPlan
from tests.unit.trainer.learner.harness import box, record, sample_tools


@pytest.mark.parametrize(
    ("reason", "at_limit", "repeated"),
    [("stop", False, False), ("length", True, False), ("repetition", False, True)],
)
def test_token_limit_and_repetition_endings_are_counted_separately(matcher, records, reason, at_limit, repeated):
    stats = sample_stats(matcher.match(records[0], Rollout([1], [2], "", "s", 0, reason)))
    assert (stats.at_limit, stats.repeated) == (at_limit, repeated)


def test_seed_of_logged_answer_is_seed_base_plus_index(matcher, records):
    plan = SeedPlan(17, 4, 0, sizes=(2, 1))
    rollout = Rollout([1], [2], "", "s", 4, "stop")
    samples = {index: matcher.match(one, rollout) for index, one in enumerate(records)}
    written = [one.origin for one in with_origin(samples, SimpleNamespace(origin={}, plan=plan), MatchOptions())]
    assert [(one["micro_step"], one["index"]) for one in written] == [(0, 0), (0, 1), (1, 0)]
    assert [one["seed_base"] + one["index"] for one in written] == [plan.seed(index) for index in range(3)]


def test_records_of_same_step_get_different_object_orders(encoder, model, image_paths):
    many = {f"object_{i}": box(f"box {i}", i, i, 400, 400) for i in range(1, 9)}
    supervisor = TruthSupervisor(sample_tools(encoder), model, shuffled_by=1)
    rollout = Rollout([], [], "", server="", version=0, finish_reason="stop")
    texts = set()
    for index in range(3):
        one = record(image_paths[0], index, **many)
        prompt = supervisor.prompt(one, supervisor.chat(one), Stopwatch())
        matched, _ = supervisor.supervise(one, prompt, rollout, Stopwatch())
        texts.add(matched.target.append_text)
    assert len(texts) == 3
