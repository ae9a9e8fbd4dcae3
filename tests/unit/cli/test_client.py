"""`stage2.Job`: a job file submitted, waited for and reported from Python; a script stands in for kubectl."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import stage2
from stage2 import Job, JobError
from stage2_api.errors import ConfigError
from tests.unit.report.reported import write_run

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "job-3v1-tiny.yaml"
KUBECTL = """#!/bin/sh
cd "${0%/*}"
echo "$@" >> asked
case $1 in
  apply) ;;
  get) cat 1.json; test -e 2.json && mv 2.json 1.json; true ;;
  logs) cat log ;;
esac
"""
Statuses = Callable[..., Path]


def status(phase: str, generation: int = 2, message: str = "") -> dict[str, Any]:
    seen = {"phase": phase, "observedGeneration": generation, "message": message, "progress": "60/60"}
    return {"metadata": {"generation": 2}, "status": seen}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Statuses:
    """Return a function that puts a kubectl on the PATH, which reads one or two states of a job in turn."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "log").write_text((write_run(tmp_path / "run") / "stage2_log.jsonl").read_text())

    def answer(*states: dict[str, Any]) -> Path:
        for number, state in enumerate(states, start=1):
            (tmp_path / f"{number}.json").write_text(json.dumps(state))
        return tmp_path

    return answer


def test_the_example_of_the_page_runs(cluster: Statuses, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = cluster(status("Running"), status("Succeeded"))
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(from stage2 import Job.*?)```", page, re.DOTALL)
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    exec(example.replace("timeout=3600", "timeout=3600, every=0.01"), {})
    assert capsys.readouterr().out == "page: run.html\n60/60 4\n"
    assert "<svg" in (folder / "run.html").read_text(encoding="utf-8")
    asked = [line.split()[0] for line in (folder / "asked").read_text().splitlines()]
    assert asked == ["apply", "get", "get", "logs", "get", "logs"]


def test_a_failed_job_raises_its_message_and_one_that_takes_longer_its_phase(cluster: Statuses) -> None:
    cluster(status("Failed", message="the learner ended with 64"))
    with pytest.raises(JobError, match="job-3v1-tiny is Failed: the learner ended with 64"):
        Job.from_file(JOB).wait()
    cluster(status("Pending", message="no node fits"))
    with pytest.raises(TimeoutError, match="job-3v1-tiny is Pending: no node fits"):
        Job.from_file(JOB).wait(timeout=0)


FLAKY = """#!/bin/sh
cd "${0%/*}"
echo "$@" >> asked
if test $(wc -l < asked) -gt FAILURES; then cat 1.json; else echo 'MESSAGE' >&2; exit 1; fi
"""
LOST = "Unable to connect to the server: net/http: TLS handshake timeout"


@pytest.mark.parametrize(
    ("message", "failures", "asked", "raised"),
    [
        (LOST, 9, 10, None),
        (LOST, 10, 10, "kubectl get of job-3v1-tiny: Unable to connect"),
        ("error: You must be logged in to the server (Unauthorized)", 1, 1, "Unauthorized"),
    ],
)
def test_waiting_outlasts_an_api_server_that_is_lost_for_a_while_and_no_refusal(
    cluster: Statuses, message: str, failures: int, asked: int, raised: str | None
) -> None:
    folder = cluster(status("Succeeded"))
    (folder / "kubectl").write_text(FLAKY.replace("FAILURES", str(failures)).replace("MESSAGE", message))
    with pytest.raises(JobError, match=raised) if raised else nullcontext():
        Job.from_file(JOB).wait(every=0.01)
    assert len((folder / "asked").read_text().splitlines()) == asked


def test_the_status_of_an_earlier_write_does_not_count(cluster: Statuses) -> None:
    cluster(status("Failed", generation=1), status("Succeeded"))
    assert Job.from_file(JOB, namespace="team").wait(every=0.01).status()["phase"] == "Succeeded"


def test_a_wrong_file_is_refused_before_kubectl_is_asked(cluster: Statuses, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(JOB.read_text().replace("servers: 3", "servers: -3"))
    with pytest.raises(ConfigError, match=r"spec\.rollout\.servers"):
        Job.from_file(wrong)


def test_what_kubectl_refuses_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'error: refused' >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for request in (lambda job: job.submit(), lambda job: job.status()):
        with pytest.raises(JobError, match="of job-3v1-tiny: error: refused"):
            request(Job.from_file(JOB))
    with pytest.raises(JobError, match="ended with 1"):
        Job.from_file(JOB).logs()


def test_logs_without_a_cluster_say_why(cluster: Statuses) -> None:
    (cluster(status("Running")) / "kubectl").write_text("#!/bin/sh\necho 'no route to host' >&2; exit 1\n")
    with pytest.raises(JobError, match="ended with 1: no route to host"):
        Job("mine").logs()


def test_package_names_its_version_and_runs_as_a_module() -> None:
    assert stage2.__version__ == version("stage2")
    done = subprocess.run([sys.executable, "-m", "stage2", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"stage2 {stage2.__version__}")


def test_error_of_a_job_file_is_caught_by_its_public_name(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("kind: Pod\n")
    with pytest.raises(stage2.ConfigError):
        Job.from_file(tmp_path / "job.yaml")
