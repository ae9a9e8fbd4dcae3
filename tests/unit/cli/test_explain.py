"""`stage2 job explain`: its output and exit code for a job."""

import json
from typing import Any

import pytest

from stage2_cli.explain import show

ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "the spec is valid"}
NO_ROOM = {
    "type": "Placed",
    "status": "False",
    "reason": "NoSingleNodeFits",
    "message": "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a",
}


def job(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "job-3v1"}, "status": {"conditions": list(conditions), **status}}


def test_missing_thing_is_printed_with_fields_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, NO_ROOM), as_json=False) == 1
    printed = capsys.readouterr().out
    assert f"Not training because of placement (NoSingleNodeFits): {NO_ROOM['message']}" in printed
    assert "Look at: spec.placement, spec.rollout and spec.learner of rmj/job-3v1" in printed


def test_training_job_reports_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, step=3, maxSteps=10), as_json=False) == 0
    assert "step 3 of 10" in capsys.readouterr().out


def test_learner_message_cannot_inject_markup_or_control_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Its words stand in the status, and who has its pod chooses them; an admin reads them."""
    sync = {"version": 3, "seconds": 1.0, "merge": "learner", "mergeReason": "[/x] [red]a\x1b[2Jb\nc"}
    assert show(job(ACCEPTED, step=3, maxSteps=10, sync=sync), as_json=False) == 0
    worse = {**NO_ROOM, "message": sync["mergeReason"]}
    assert show(job(ACCEPTED, worse), as_json=False) == 1
    printed = "".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert "\x1b" not in printed
    assert printed.replace(" ", "").count(r"[/x][red]a\x1b[2Jb\nc") == 3, "in both chains, and in what is missing"


def test_json_option_prints_steps_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, NO_ROOM), as_json=True) == 1
    assert [step["state"] for step in json.loads(capsys.readouterr().out)] == ["ok", "wrong", "waits"]


def test_job_unseen_by_controller_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(), as_json=False) == 1
    assert "is stage2 installed" in capsys.readouterr().err
