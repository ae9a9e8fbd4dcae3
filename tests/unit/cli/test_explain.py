"""`stage2 explain`: its output and exit code for a job from kubectl."""

import json
from pathlib import Path
from typing import Any

import pytest

from stage2_cli.explain import explain_job, show

ACCEPTED = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "the spec is valid"}
NO_ROOM = {
    "type": "Placed",
    "status": "False",
    "reason": "NoSingleNodeFits",
    "message": "needs 4 nvidia.com/gpu on one node; the largest free is 3 on node-a",
}


def job(*conditions: dict[str, str], **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "job-3v1"}, "status": {"conditions": list(conditions), **status}}


def test_what_is_missing_is_printed_with_the_fields_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, NO_ROOM), as_json=False) == 1
    printed = capsys.readouterr().out
    assert f"Not training because of placement (NoSingleNodeFits): {NO_ROOM['message']}" in printed
    assert "Look at: spec.placement, spec.rollout and spec.learner of rmj/job-3v1" in printed


def test_a_training_job_lacks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, step=3, maxSteps=10), as_json=False) == 0
    assert "step 3 of 10" in capsys.readouterr().out


def test_a_learners_words_are_no_markup_and_move_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    """Its words stand in the status, and who has its pod chooses them; an admin reads them."""
    sync = {"version": 3, "seconds": 1.0, "merge": "learner", "mergeReason": "[/x] [red]a\x1b[2Jb\nc"}
    assert show(job(ACCEPTED, step=3, maxSteps=10, sync=sync), as_json=False) == 0
    worse = {**NO_ROOM, "message": sync["mergeReason"]}
    assert show(job(ACCEPTED, worse), as_json=False) == 1
    printed = "".join(line.strip() for line in capsys.readouterr().out.splitlines())
    assert "\x1b" not in printed
    assert printed.replace(" ", "").count(r"[/x][red]a\x1b[2Jb\nc") == 3, "in both chains, and in what is missing"


def test_machines_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(ACCEPTED, NO_ROOM), as_json=True) == 1
    assert [step["state"] for step in json.loads(capsys.readouterr().out)] == ["ok", "wrong", "waits"]


def test_a_job_that_no_controller_has_seen_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(job(), as_json=False) == 2
    assert "is stage2 installed" in capsys.readouterr().err


REFUSED = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
KUBECTL = f"""#!/bin/sh
echo 'E1126 15:36:42.5 1 memcache.go:265] "Unhandled Error" err="connection refused"' >&2
echo '{REFUSED}' >&2
exit 1
"""


@pytest.mark.parametrize(("kubectl", "shown"), [(KUBECTL, REFUSED), (None, "it is not installed")])
def test_without_a_cluster_one_line_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kubectl: str | None,
    shown: str,
) -> None:
    if kubectl is not None:
        (tmp_path / "kubectl").write_text(kubectl)
        (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert explain_job("job-3v1", [], as_json=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kubectl cannot read job-3v1 from a cluster: ")
    assert shown in line
