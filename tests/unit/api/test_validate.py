"""A document that is wrong in form is repaired, so that the rules between its other keys are told in the same pass."""

from __future__ import annotations

from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from tests.unit.api.wrong_jobs import good_job, merge_patch

TWO_GPUS = {"spec": {"learner": {"gpus": 2}}}  # breaks a rule: beside servers the learner is one process


def paths(*patches: dict[str, Any]) -> list[str]:
    """Return the paths of all problems of the good job with patches."""
    job = good_job()
    for patch in patches:
        job = merge_patch(job, patch)
    with pytest.raises(ConfigError) as refused:
        parse_job(job)
    return [problem.path for problem in refused.value.problems]


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
def test_what_is_wrong_in_form_hides_no_rule_about_other_keys(wrong: dict[str, Any], path: str) -> None:
    assert paths({"spec": wrong}, TWO_GPUS) == [path, "spec.learner.gpus"]


def test_a_rule_about_a_list_with_a_wrong_item_is_not_told() -> None:
    volumes = [{"name": "tmp", "mountPath": "data", "emptyDir": {}}]  # the name is stage2's own
    assert paths({"spec": {"volumes": volumes}}) == ["spec.volumes[0].mountPath"]
