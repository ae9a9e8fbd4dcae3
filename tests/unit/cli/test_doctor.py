"""`stage2 doctor`: its exit code and its JSON, of a job file."""

import json
from pathlib import Path
from typing import Any

import pytest

from stage2_api.errors import ConfigError
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


def logged_step(wall: float = 10.0) -> dict[str, Any]:
    """Return a step of 10 s, 9 of which the learner takes for passes; the busiest server works for 5."""
    parts = {"generate": 0.0, "wait": 0.0, "forward": 3.0, "backward": 6.0, "sync": 0.5}
    servers = [{"server": f"http://{i}", "busy_share": one, "in_flight": 1.0} for i, one in enumerate((0.3, 0.4, 0.5))]
    times = {"step/wall_s": wall, **{f"step/{name}_s": value for name, value in parts.items()}}
    lengths = {"rollout/staleness": 1.0, "rollout/gen_new_tokens_total": 16e3, "rollout/gen_new_tokens_mean": 500.0}
    rows = {"rollout/encoded_len_mean": 1500.0, "packing/post_rollout_selected_total_len": 6e3}
    return {"event": "step", "step": 1, **times, **lengths, **rows, "servers": servers}


def divisions(
    capsys: pytest.CaptureFixture[str], job: Path, mapped: list[str], *, cpu: bool = False, log: Path | None = None
) -> list[str]:
    pipelined = "custom.extra.rollout_matching.pipeline.enabled=true"
    examine(job, mapped=mapped, changes=[pipelined], cpu=cpu, as_json=True, log=log)
    found = json.loads(capsys.readouterr().out)
    return [f"{one['verdict']}: {one['status']}" for one in found if one["what"] == "division of GPUs"]


def test_division_of_gpus_is_compared_with_others_by_log_of_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job, mapped = JOB.with_name("job-3v1.yaml"), [f"/output={tmp_path}"]
    (before,) = divisions(capsys, job, mapped)
    assert before.startswith("good: 3 + 1 (servers + learner GPUs); other divisions are compared once")
    start = {"event": "start", "step": 0, "max_steps": 99, "processes": 1}
    log = tmp_path / "job-3v1" / "stage2_log.jsonl"
    log.parent.mkdir()
    log.write_text("".join(f"{json.dumps(one)}\n" for one in (start, *[logged_step()] * 11)))
    (after,) = divisions(capsys, job, mapped)
    assert after.startswith("doubtful: 3 + 1 (servers + learner GPUs) took 10.0 s a step (mean of 10): servers 5.0 s")
    assert not divisions(capsys, job, mapped, cpu=True)
    assert not divisions(capsys, JOB.with_name("job-jobset.yaml"), mapped), "its nodes come and go"


def test_log_that_cannot_be_read_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a process is a file whose first bytes nobody can read, as a broken disk's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job, log = JOB.with_name("job-3v1.yaml"), tmp_path / "job-3v1" / "stage2_log.jsonl"
    log.parent.mkdir()
    log.symlink_to("/proc/self/mem")
    assert divisions(capsys, job, [f"/output={tmp_path}"]) == [f"doubtful: {log}: Input/output error"]


def test_saved_log_takes_place_of_that_in_output_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job, saved = JOB.with_name("job-3v1.yaml"), tmp_path / "learner.log"
    start = {"event": "start", "step": 0, "max_steps": 99, "processes": 1}
    saved.write_text("noise\n" + "".join(f"{json.dumps(one)}\n" for one in (start, *[logged_step()] * 11)))
    (found,) = divisions(capsys, job, [], log=saved)
    assert found.startswith("doubtful: 3 + 1")
    with pytest.raises(ConfigError, match=r"--log: .*nowhere'; must be a run's output folder"):
        divisions(capsys, job, [], log=tmp_path / "nowhere")
    for other in ("job-colocate.yaml", "job-jobset.yaml", "job-grpo-objects.yaml"):
        with pytest.raises(ConfigError, match=r"--log: .*this run has none to divide; leave it out"):
            examine(JOB.with_name(other), mapped=[], changes=[], log=saved)
