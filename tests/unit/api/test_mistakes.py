"""Wrong job files are refused with the field, the value found, the rule and the way out."""

import pytest

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from tests.unit.api.wrong_jobs import Mistake, good_job, merge_patch, mistakes

MISTAKES = mistakes()


def test_the_job_without_mistakes_is_taken() -> None:
    assert parse_job(good_job()).spec.rollout.servers == 3


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_wrong_job_is_refused_with_one_problem_that_names_field_and_way_out(mistake: Mistake) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_job(mistake.job)
    (problem,) = refused.value.problems
    assert problem.path == mistake.path
    assert mistake.rule in str(problem)
    assert problem.way_out


def test_there_are_at_least_twenty_mistakes_and_no_two_are_alike() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 20


def test_all_mistakes_of_one_file_are_told_at_once() -> None:
    chosen = ["a misspelt key of the spec", "two learner GPUs beside servers", "a negative temperature"]
    several = [mistake for mistake in MISTAKES if mistake.name in chosen]
    job = good_job()
    for mistake in several:
        job = merge_patch(job, mistake.patch)
    with pytest.raises(ConfigError) as refused:
        parse_job(job)
    assert {problem.path for problem in refused.value.problems} == {mistake.path for mistake in several}


def test_a_key_that_is_wrong_in_form_brings_no_problems_of_rules_that_read_it() -> None:
    job = merge_patch(
        good_job(), {"spec": {"config": {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": 3}}}}}}}
    )
    with pytest.raises(ConfigError) as refused:
        parse_job(job)
    assert [problem.path for problem in refused.value.problems] == [
        "spec.config.custom.extra.rollout_matching.vllm.mode"
    ]
