"""`stage2 doctor`: its exit code and its JSON, of a job file."""

import json
from pathlib import Path
from typing import Any

import pytest

from stage2_cli.doctor import examine

JOB = Path(__file__).parents[3] / "examples" / "job-3v1-tiny.yaml"


def findings(capsys: pytest.CaptureFixture[str], *, cpu: bool) -> dict[str, dict[str, Any]]:
    code = examine(JOB, mapped=[], changes=[], cpu=cpu, as_json=True)
    found = {one["what"]: one for one in json.loads(capsys.readouterr().out)}
    assert code == 64, "the data of the job are not here"
    assert found["records"]["verdict"] == "missing"
    return found


def test_a_job_lacks_gpus_unless_the_cpu_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert findings(capsys, cpu=False)["GPUs"]["verdict"] == "missing"
    on_cpu = findings(capsys, cpu=True)
    assert on_cpu["GPUs"]["verdict"] == "good"
    assert "settings" not in on_cpu, "the recipe of the job holds: nobody set the keys that it sets"
