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


def test_missing_gpus_are_reported_unless_cpu_is_requested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert findings(capsys, cpu=False)["GPUs"]["verdict"] == "missing"
    on_cpu = findings(capsys, cpu=True)
    assert on_cpu["GPUs"]["verdict"] == "good"
    assert "settings" not in on_cpu, "the recipe of the job holds: nobody set the keys that it sets"


def test_job_without_gpus_is_not_reported_to_leave_gpus_unused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.read_text().replace("gpuResource: nvidia.com/gpu", "gpuResource: ''"))
    examine(job, mapped=[], changes=[], as_json=True)
    (gpus,) = [one for one in json.loads(capsys.readouterr().out) if one["what"] == "GPUs"]
    assert (gpus["verdict"], gpus["status"]) == ("good", "the job asks for none, and runs on the CPU")
