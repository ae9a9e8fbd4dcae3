"""Requests of rollouts: their seeds, and the check for loops that a server makes of `repeat_terminate`."""

import random

import pytest

from stage2_api.rollout_matching import RepeatTerminate
from stage2_trainer.wire.requests import RepetitionDetection, SeedPlan, request_seed
from tests.unit.trainer.matching.golden import golden


@pytest.mark.parametrize("case", golden()["seeds"])
def test_request_seeds_match_golden_vectors(case):
    plan = (case["training_seed"], case["global_step"], case["micro_step"], case["index"])
    assert request_seed(*plan) == case["seed"]


def test_request_seed_follows_formula():
    assert request_seed(17, 3, 2, 1) == 3016409


def test_requests_of_neighbouring_steps_have_distinct_seeds():
    seeds = [request_seed(42, s, m, i) for s in range(3) for m in range(8) for i in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_seed_plan_gives_seeds_of_its_micro_step():
    plan = SeedPlan(training_seed=5, global_step=2, micro_step=1)
    assert plan.base == request_seed(5, 2, 1, 0)
    assert plan.seed(3) == request_seed(5, 2, 1, 3)


def test_computing_seeds_of_step_takes_linear_time():
    class Counted(tuple):
        reads = 0

        def __iter__(self):
            Counted.reads += len(self)
            return super().__iter__()

    plan = SeedPlan(17, 3, 0, sizes=Counted((1,) * 1000))
    assert [plan.position(index) for index in range(1000)] == [(index, 0) for index in range(1000)]
    assert Counted.reads == 1000


def check(size, times=2):
    return RepetitionDetection.from_rules(RepeatTerminate(enabled=True, ngram_size=size, ngram_repeats=times))


def test_disabled_repeat_terminate_gives_no_repetition_detection():
    assert RepetitionDetection.from_rules(RepeatTerminate()) is None


@pytest.mark.parametrize("period", range(1, 65))
def test_loop_of_any_period_is_detected_within_rule_limit(period):
    loop = [1000 + i % period for i in range(64 * 2)]
    text = list(range(300))
    first = next(n for n in range(1, len(loop) + 1) if check(64).ends_in_loop([*text, *loop[:n]]))
    assert 33 * 2 <= first <= 64 * 2


@pytest.mark.parametrize(
    ("answer", "size", "times", "found"),
    [
        ([], 4, 2, False),
        ([5], 1, 2, False),
        ([5, 5], 1, 2, True),
        ([7, 1, 2, 1, 2], 2, 2, True),
        ([1, 2, 1, 2, 7], 2, 2, False),
        ([1, 2, 1, 2], 2, 3, False),
        ([9, 1, 2, 1, 2, 1, 2], 2, 3, True),
        ([1, 2, 3, 4, 5, 1, 2, 3, 4, 6], 5, 2, False),
    ],
)
def test_only_real_loop_is_detected(answer, size, times, found):
    assert check(size, times).ends_in_loop(answer) is found


def test_loop_detection_equals_brute_force_definition():
    draws = random.Random(3)
    for _ in range(2000):
        size, times = draws.randint(1, 6), draws.randint(2, 3)
        answer = [draws.randint(0, 1) for _ in range(draws.randint(0, 24))]
        by_hand = any(
            len(answer) >= n * times and answer[-n * times :] == answer[-n:] * times
            for n in range(size // 2 + 1, size + 1)
        )
        assert check(size, times).ends_in_loop(answer) is by_hand
