"""Pod templates that would break the job's contract are refused with path, value, rule and way out."""

from typing import Any

import pytest

from stage2_controller import reasons
from tests.unit.controller import builders as b

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "a command",
        {"spec": {"containers": [{"name": "learner", "command": ["x"]}]}},
        "template.spec.containers[0].command",
    ),
    ("a nameless container", {"spec": {"containers": [{"image": "x"}]}}, "template.spec.containers[0]"),
    ("a restart policy", {"spec": {"restartPolicy": "Always"}}, "template.spec.restartPolicy"),
    ("a field beside spec", {"containers": []}, "template.containers"),
]


@pytest.mark.parametrize(("template", "path"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_it_is_refused(template: dict[str, Any], path: str) -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert f"spec.learner.{path}: " in b.message(made, reasons.ACCEPTED)


def test_a_sidecar_may_have_a_command() -> None:
    template = {"spec": {"containers": [{"name": "logs", "image": "x", "command": ["tail"]}]}}
    assert b.planned(b.job(learner={"gpus": 1, "template": template})).children
