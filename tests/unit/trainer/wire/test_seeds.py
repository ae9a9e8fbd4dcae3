"""Seeds depend on run, step, micro-step and request, and on nothing else."""

import pytest

from stage2_trainer.wire.requests import SeedPlan, request_seed


@pytest.mark.parametrize(
    ("seed", "step", "index", "expected"), [(17, 3, 0, 3000026), (17, 3, 2, 3000028), (42, 5000, 7, 705047753)]
)
def test_the_first_micro_step_has_the_seeds_of_the_first_implementation(seed, step, index, expected):
    assert request_seed(seed, step, 0, index) == expected


@pytest.mark.parametrize(("seed", "step", "micro_step", "index", "expected"), [(17, 3, 2, 1, 3016409)])
def test_each_micro_step_has_the_seeds_of_the_formula(seed, step, micro_step, index, expected):
    assert request_seed(seed, step, micro_step, index) == expected


def test_no_two_requests_of_neighbouring_steps_share_a_seed():
    seeds = [request_seed(42, s, m, i) for s in range(3) for m in range(8) for i in range(64)]
    assert len(set(seeds)) == len(seeds)


def test_a_plan_gives_the_seeds_of_its_micro_step():
    plan = SeedPlan(training_seed=5, global_step=2, micro_step=1)
    assert plan.base == request_seed(5, 2, 1, 0)
    assert plan.seed(3) == request_seed(5, 2, 1, 3)
