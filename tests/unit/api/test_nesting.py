"""However deep an object is nested, it is refused with its path; what people write is not deep."""

from __future__ import annotations

import json
import sys

import pytest

from stage2_api.errors import ConfigError, Problem
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.validation.size import DEEPEST, require_shallow
from tests.unit.api.wrong_jobs import good_job


def nested(levels, *, by="mapping"):
    found = {} if by == "mapping" else []
    for _ in range(levels - 1):
        found = {"a": found} if by == "mapping" else [found]
    return found


@pytest.mark.parametrize("by", ["mapping", "list"])
@pytest.mark.parametrize("levels", [1_000, 9_990])
def test_a_template_that_is_nested_too_deep_is_refused_by_its_path(levels, by):
    job = good_job()
    job["spec"]["rollout"]["template"] = {"spec": nested(levels, by=by)}
    with pytest.raises(ConfigError, match=r"^spec\.rollout\.template\.spec.*; must not be nested deeper than 64"):
        parse_job(job)


def test_so_is_a_configuration():
    config = good_job()["spec"]["config"] | {"deepspeed": nested(2_000)}
    with pytest.raises(ConfigError, match=r"^spec\.config\.deepspeed.*nested deeper"):
        parse_run_config(config, root="spec.config")


def test_the_bound_is_exact():
    require_shallow(nested(DEEPEST))
    require_shallow(json.loads("[" * DEEPEST + "1" + "]" * DEEPEST))
    with pytest.raises(ConfigError):
        require_shallow(nested(DEEPEST + 2))


def test_it_calls_itself_for_no_level():
    limit = sys.getrecursionlimit()
    deep = nested(50_000)
    assert limit < 50_000
    with pytest.raises(ConfigError):
        require_shallow(deep)


def test_aliases_that_stand_for_more_than_memory_holds_are_looked_at_once():
    laughs: object = "ha"
    for _ in range(DEEPEST - 1):
        laughs = [laughs] * 9
    require_shallow(laughs)
    with pytest.raises(ConfigError):
        require_shallow([[[laughs]]])


@pytest.mark.parametrize("count", [1, 2, 100_000])
def test_as_many_problems_are_told_as_fit_and_how_many_more(count):
    error = ConfigError(Problem(f"key_{number}", number, "is wrong", "mend it") for number in range(count))
    told = error.within(1_000).splitlines()
    assert told[0] == str(error.problems[0])
    assert len("\n".join(told)) < 1_100
    assert (told[-1] == f"and {count - len(told) + 1} more") is (count > 2)


def test_one_long_problem_is_cut():
    assert len(ConfigError([Problem("x" * 5_000, 1, "is wrong", "mend it")]).within(1_000)) == 1_000
