"""Wrong jobs: one problem per mistake, all in one pass, with path, rule and way out."""

from __future__ import annotations

from typing import Any

import pytest

from stage2_api.parsing import parse_job
from tests.unit.api.wrong_jobs import Mistake, good_job, mistakes, patched, problems_of

MISTAKES = mistakes()


def test_valid_job_is_accepted() -> None:
    assert parse_job(good_job()).spec.rollout.servers == 3


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_each_mistake_gives_single_problem_with_field_and_advice(mistake: Mistake) -> None:
    (problem,) = problems_of(parse_job, mistake.job)
    assert problem.path == mistake.path
    assert mistake.rule in str(problem)
    assert problem.way_out


def test_all_mistakes_are_reported_at_once() -> None:
    chosen = ["a misspelt key of the spec", "two learner GPUs beside servers", "a negative temperature"]
    several = [mistake for mistake in MISTAKES if mistake.name in chosen]
    assert set(paths(*(mistake.patch for mistake in several))) == {mistake.path for mistake in several}


def test_malformed_key_causes_no_further_rule_problems() -> None:
    wrong = {"spec": {"config": {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": 3}}}}}}}
    assert paths(wrong) == ["spec.config.custom.extra.rollout_matching.vllm.mode"]


TWO_GPUS = {"spec": {"learner": {"gpus": 2}}}  # breaks a rule: beside servers the learner is one process


def paths(*patches: dict[str, Any]) -> list[str]:
    """Return the paths of all problems of the good job with patches."""
    return [problem.path for problem in problems_of(parse_job, patched(good_job(), *patches))]


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, "spec.volumes[0].mountPath"),
        ({"volumes": [{"name": "a", "mountPath": "data", "emptyDir": {}}]}, "spec.volumes[0].mountPath"),
        ({"placement": {"tolerations": ["all"]}}, "spec.placement.tolerations[0]"),
        ({"config": {"training": {"output_dir": None}}}, "spec.config.training.output_dir"),
        ({"config": {"custom": {"train_jsonl": 3}}}, "spec.config.custom.train_jsonl"),
        ({"learner": {"backoffLimit": "many"}}, "spec.learner.backoffLimit"),
    ],
    ids=["missing in an item", "wrong in an item", "a wrong item", "missing", "wrong and needed", "wrong"],
)
def test_malformed_key_does_not_hide_problems_of_other_keys(wrong: dict[str, Any], path: str) -> None:
    assert paths({"spec": wrong}, TWO_GPUS) == [path, "spec.learner.gpus"]


def test_list_rule_is_skipped_if_item_is_malformed() -> None:
    volumes = [{"name": "tmp", "mountPath": "data", "emptyDir": {}}]  # the name is stage2's own
    assert paths({"spec": {"volumes": volumes}}) == ["spec.volumes[0].mountPath"]
