"""Bounds of size and nesting, in Python and in the policy that the API server evaluates."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from stage2_api.admission import known_keys_policy
from stage2_api.errors import ConfigError, Problem
from stage2_api.parsing import parse_job, parse_run_config
from stage2_api.validation.size import DEEPEST, LARGEST, MOST_PARTS, characters, parts, require_shallow, require_small
from tests.unit.api.api_server import admitted
from tests.unit.api.wrong_jobs import good_job


def deep(levels, *, by="mapping"):
    found = {} if by == "mapping" else []
    for _ in range(levels - 1):
        found = {"a": found} if by == "mapping" else [found]
    return found


@pytest.mark.parametrize("by", ["mapping", "list"])
@pytest.mark.parametrize("levels", [1_000, 9_990])
def test_too_deeply_nested_template_is_refused_with_path(levels, by):
    job = good_job()
    job["spec"]["rollout"]["template"] = {"spec": deep(levels, by=by)}
    with pytest.raises(ConfigError, match=r"^spec\.rollout\.template\.spec.*; must not be nested deeper than 64"):
        parse_job(job)


def test_too_deeply_nested_config_is_refused_with_path():
    config = good_job()["spec"]["config"] | {"deepspeed": deep(2_000)}
    with pytest.raises(ConfigError, match=r"^deepspeed.*nested deeper"):
        parse_run_config(config)


def test_nesting_limit_is_exact():
    require_shallow(deep(DEEPEST))
    require_shallow(json.loads("[" * DEEPEST + "1" + "]" * DEEPEST))
    with pytest.raises(ConfigError):
        require_shallow(deep(DEEPEST + 2))


def test_nesting_check_does_not_recurse():
    limit = sys.getrecursionlimit()
    lists = deep(50_000)
    assert limit < 50_000
    with pytest.raises(ConfigError):
        require_shallow(lists)


def test_nested_yaml_aliases_are_visited_once():
    laughs: object = "ha"
    for _ in range(DEEPEST - 1):
        laughs = [laughs] * 9
    require_shallow(laughs)
    with pytest.raises(ConfigError):
        require_shallow([[[laughs]]])


@pytest.mark.parametrize("count", [1, 2, 100_000])
def test_reported_problems_are_cut_to_limit_and_rest_counted(count):
    error = ConfigError(Problem(f"key_{number}", number, "is wrong", "mend it") for number in range(count))
    shown = error.within(1_000).splitlines()
    assert shown[0] == str(error.problems[0])
    assert len("\n".join(shown)) < 1_100
    assert (shown[-1] == f"and {count - len(shown) + 1} more") is (count > 2)


def test_single_long_problem_is_cut():
    assert len(ConfigError([Problem("x" * 5_000, 1, "is wrong", "mend it")]).within(1_000)) == 1_000


POLICY = known_keys_policy()


def job_with(value: Any) -> dict[str, Any]:
    made = good_job()
    made["spec"]["config"]["deepspeed"] = {"train_batch_size": 1, "more": value}
    return made


@pytest.mark.parametrize(
    ("value", "of"),
    [
        ("x" * LARGEST, "characters"),
        ({f"key_{index}": index for index in range(LARGEST // 8)}, "characters"),
        ([1] * LARGEST, "characters"),
        ([0.1234567] * (LARGEST // 9), "characters"),
        ([{}] * MOST_PARTS, "mappings, lists and brackets in texts"),
        ([[]] * MOST_PARTS, "mappings, lists and brackets in texts"),
        ("[{" * (MOST_PARTS // 2), "mappings, lists and brackets in texts"),
    ],
    ids=["text", "keys", "numbers", "long numbers", "mappings", "lists", "brackets"],
)
def test_oversized_spec_is_refused_by_parser_and_api_server_naming_largest_section(value: Any, of: str) -> None:
    job = job_with(value)
    with pytest.raises(
        ConfigError, match=rf"^spec\.config: [a-z0-9, ]* {of}.*; the whole spec must have at most [\d,]*; "
    ):
        parse_job(job)
    assert f" {of}; the whole spec must have at most" in admitted(POLICY, job)


def test_job_accepted_before_size_limits_can_be_suspended_but_not_grow() -> None:
    old, ended = job_with("x" * 2 * LARGEST), job_with("x" * 2 * LARGEST)
    ended["spec"]["suspend"] = True
    assert admitted(POLICY, ended, old) == ""
    bounded_in_time = {**ended, "spec": {**ended["spec"], "activeDeadlineSeconds": 2**31 - 1}}
    assert admitted(POLICY, bounded_in_time, ended) == admitted(POLICY, old, bounded_in_time) == ""
    assert admitted(POLICY, job_with("y" * 2 * LARGEST), old) == ""
    for grown in (job_with("x" * 3 * LARGEST), job_with("x" * (2 * LARGEST + 1))):
        assert " characters; the whole spec must have at most" in admitted(POLICY, grown, old)
        grown["spec"]["suspend"] = True
        assert " characters; the whole spec must have at most" in admitted(POLICY, grown, old)


@pytest.mark.parametrize(
    ("value", "more", "of"),
    [
        ([{}] * (MOST_PARTS - 100), [{}] * 60, "mappings, lists and brackets in texts"),
        (["x" * (LARGEST - 4_000)], ["x" * 60], "characters"),
    ],
    ids=["mappings", "text"],
)
def test_size_limit_cannot_be_passed_by_many_small_edits(value: Any, more: Any, of: str) -> None:
    """A suspended job may be edited as often as anybody likes: what each edit adds would add up."""
    old = job_with(value)
    old["spec"]["suspend"] = True
    for _ in range(100):
        value = [*value, *more]
        new = job_with(value)
        new["spec"]["suspend"] = True
        if refused := admitted(POLICY, new, old):
            break
        old = new
    assert f" {of}; the whole spec must have at most" in refused
    assert admitted(POLICY, old) == ""


@pytest.mark.parametrize(
    ("value", "of"),
    [([1] * LARGEST, "characters"), ([{}] * MOST_PARTS, "mappings, lists")],
    ids=["numbers", "mappings"],
)
def test_top_level_keys_beside_spec_are_limited_in_size(value: Any, of: str) -> None:
    with pytest.raises(ConfigError, match=rf"^junk: [a-z0-9, ]* {of}.*; the whole job must have at most [\d,]*; "):
        parse_job({**good_job(), "junk": value})
    noted = {**good_job()["metadata"], "annotations": {"note": "x" * 2 * LARGEST}}
    assert parse_job({**good_job(), "metadata": noted})


def test_large_job_within_limits_is_accepted() -> None:
    job = job_with({"texts": ["x" * 30_000] * 3, "parts": [{}] * 3_000})
    assert admitted(POLICY, job) == ""
    assert parse_job(job).spec.config.deepspeed == job["spec"]["config"]["deepspeed"]


def test_nesting_depth_is_limited_by_number_of_parts() -> None:
    spec = good_job()["spec"] | {"rollout": {"template": deep(MOST_PARTS)}}
    assert parts(spec, most=MOST_PARTS) > MOST_PARTS
    with pytest.raises(ConfigError, match=r"^spec\.rollout: 4,0\d\d|more than 4,000 mappings, lists"):
        require_small({"spec": spec})


def test_character_count_approximates_json_length() -> None:
    spec = good_job()["spec"]
    assert characters(spec, most=LARGEST) == pytest.approx(len(json.dumps(spec, separators=(",", ":"))), rel=0.1)


def test_yaml_aliases_are_counted_only_up_to_limit() -> None:
    laughs: Any = "ha"
    for _ in range(60):
        laughs = [laughs] * 9
    assert LARGEST < characters(laughs, most=LARGEST) < 2 * LARGEST
    assert MOST_PARTS < parts(laughs, most=MOST_PARTS) < 2 * MOST_PARTS
