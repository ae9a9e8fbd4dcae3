"""`stage2.Job`: jobs from Python, against an API server of this process."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import stage2
from stage2 import ClusterUnavailable, Job, JobError, RequestRefused
from stage2_api.errors import ConfigError
from tests.unit.cli import client_contract
from tests.unit.cli.job_api import JobApi, api_server
from tests.unit.report.reported import write_run

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples" / "job-3v1-tiny.yaml"
NAME = "job-3v1-tiny"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobApi]:
    with api_server(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        yield server


@pytest.fixture
def job(api: JobApi) -> Job:
    return Job.from_file(FILE, namespace="team-a").submit()


def pod(name: str, *containers: str, restarts: int = 0, state: str = "running") -> dict[str, Any]:
    started = [{"name": one, "state": {state: {}}, "restartCount": restarts} for one in containers]
    spec = {"containers": [{"name": one} for one in containers]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"containerStatuses": started}}


def test_client_keeps_contract_against_stand_in_api(api: JobApi) -> None:
    client_contract.a_job_is_submitted_listed_suspended_resumed_and_deleted(FILE, "team-a")
    client_contract.names_lead_to_no_other_object("team-a")


def test_example_in_docs_runs(
    api: JobApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.pods = [pod("learner-abc", "learner")]
    api.logs["learner-abc", "learner"] = [(write_run(tmp_path / "run") / "stage2_log.jsonl").read_bytes()]
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```py\n(from stage2 import Job.*?)```", page, re.DOTALL)
    submit, rest = example.split("job.wait", 1)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(submit, variables)
    api.report(NAME, "default", phase="Succeeded", progress="60/60")
    exec(f"job.wait{rest}", variables)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["page: run.html", "Succeeded 60/60"]
    assert len(lines) == 2 + 4
    assert "<svg" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_wait_raises_message_of_failed_job_and_phase_on_timeout(api: JobApi, job: Job) -> None:
    api.report(NAME, phase="Failed", message="the learner ended with 64")
    with pytest.raises(JobError, match="job-3v1-tiny is Failed: the learner ended with 64"):
        job.wait()
    api.report(NAME, phase="Pending", message="no node fits")
    with pytest.raises(TimeoutError, match="job-3v1-tiny is Pending: no node fits"):
        job.wait(timeout=0)


@pytest.mark.parametrize(
    ("failures", "requests", "raised"),
    [([503] * 9, 10, None), ([503] * 10, 10, "etcd is not there"), ([403], 1, "etcd is not there")],
)
def test_wait_survives_lost_api_server_but_not_refusal(
    api: JobApi, job: Job, failures: list[int], requests: int, raised: str | None
) -> None:
    api.report(NAME, phase="Succeeded")
    api.failures, before = failures, len(api.requests)
    with pytest.raises(JobError, match=raised) if raised else nullcontext():
        job.wait(every=0.01)
    assert len(api.requests) - before == requests


def test_wait_ignores_status_of_earlier_generation(api: JobApi, job: Job) -> None:
    api.report(NAME, phase="Failed", observedGeneration=0)
    assert job.status().phase is None
    api.report(NAME, phase="Running", progress="3/60", ofANewerVersion={"x": 1})
    assert (job.status().phase, job.status().progress) == ("Running", "3/60")


def test_invalid_job_file_is_refused_before_any_request(api: JobApi, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(FILE.read_text().replace("servers: 3", "servers: -3"))
    with pytest.raises(stage2.ConfigError, match=r"spec\.rollout\.servers"):
        Job.from_file(wrong)
    assert api.requests == []
    with pytest.raises(ConfigError, match=r"Job: 'mine'; has no file to submit; use Job\.from_file"):
        Job("mine").submit()


def test_a_generated_name_and_a_changed_setting_are_submitted(api: JobApi, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FILE.read_text().replace("name: job-3v1-tiny", "generateName: try-", 1))
    job = Job.from_file(file, changes=["training.seed=7"]).submit()
    assert job.name == "try-abcde"
    assert job.read()["spec"]["config"]["training"]["seed"] == 7


def test_refusal_by_api_server_is_raised_with_its_message(api: JobApi, job: Job) -> None:
    for ask in (Job.submit, Job.status, Job.logs, Job.events, Job.suspend, Job.delete):
        api.failures = [422]
        with pytest.raises(RequestRefused, match=r"^etcd is not there$"):
            ask(job)


@pytest.mark.parametrize("ask", [Job.read, Job.logs, Job.wait], ids=lambda one: one.__name__)
def test_every_request_without_cluster_raises_error_with_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "lost"))
    with pytest.raises(ClusterUnavailable, match=r"no cluster is configured: .*lost: .*--context"):
        ask(Job("mine"))
    with api_server(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
    monkeypatch.setattr("stage2_cli.job.MOST_LOST", 1)
    with pytest.raises(ClusterUnavailable, match=r"^http://127\.0\.0\.1:\d+ cannot be reached: .*refused"):
        ask(Job("mine"))
    with pytest.raises(ClusterUnavailable, match="far"):
        ask(Job("mine", context="far"))


def test_answer_of_other_server_than_api_server_is_reported(api: JobApi, job: Job) -> None:
    api.pods = [pod("a", "learner")]
    api.logs["a", "learner"] = [b"<html>"]
    with pytest.raises(ClusterUnavailable, match="does not answer as an API server does"):
        job._cluster.ask("GET", "/api/v1/namespaces/team-a/pods/a/log", query={"container": "learner"})


def test_each_request_has_impersonation_headers(api: JobApi) -> None:
    Job.list(user="ann")
    assert api.headers[-1]["Impersonate-User"] == "ann"


def test_events_are_sorted_by_their_last_time(api: JobApi, job: Job) -> None:
    api.events = [
        {
            "metadata": {},
            "type": "Warning",
            "reason": "B",
            "message": "late",
            "count": 3,
            "lastTimestamp": "2026-01-02",
        },
        {"metadata": {"creationTimestamp": "2026-01-01"}, "reason": "A", "message": "early", "lastTimestamp": None},
    ]
    assert [(event.reason, event.type, event.count) for event in job.events()] == [
        ("A", "Normal", 1),
        ("B", "Warning", 3),
    ]
    assert api.requests[-1][2] == {"fieldSelector": f"involvedObject.uid={job.read()['metadata']['uid']}"}


def test_logs_of_job_without_pods_report_its_phase(api: JobApi, job: Job) -> None:
    api.report(NAME, phase="Suspended", message="spec.suspend is true")
    with pytest.raises(JobError, match=r"has no learner pod whose log could be read; .* is Suspended: spec\.suspend"):
        job.logs()


def test_log_lines_are_whole_however_response_is_split(api: JobApi, job: Job) -> None:
    api.pods = [pod("a", "learner", "sidecar")]
    api.logs["a", "learner"] = [b"one\ntw", b"o\r\n\xff", b"\n", "ü".encode()[:1], "ü".encode()[1:]]
    assert list(job.logs()) == ["one", "two", "\\xff", "ü"]


def test_followed_logs_of_servers_come_line_by_line_with_their_container(api: JobApi, job: Job) -> None:
    api.pods = [pod("a", "server-0", "server-1")]
    api.logs = {("a", "server-0"): [b"zero\n", b"end\n"], ("a", "server-1"): [b"one\n", b"end\n"]}
    log = job.logs(servers=True, follow=True)
    assert {next(log), next(log)} == {"[pod/a/server-0] zero", "[pod/a/server-1] one"}
    api.released.set()
    api.report(NAME, phase="Succeeded")
    assert sorted(log) == ["[pod/a/server-0] end", "[pod/a/server-1] end"]


@pytest.mark.parametrize(
    "replaced", [pod("b", "learner"), pod("a", "learner", restarts=1)], ids=["another pod", "the same pod again"]
)
def test_followed_log_continues_after_learner_restart(
    api: JobApi, job: Job, replaced: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stage2_cli.job.LOOK_S", 0.05)
    api.released.set()
    api.pods = [pod("a", "learner")]
    api.logs = {("a", "learner"): [b"one\n"], ("b", "learner"): [b"two\n"]}
    log = job.logs(follow=True)
    assert next(log) == "one"
    api.logs["a", "learner"] = [b"two\n"]
    api.pods = [{**replaced, "status": pod("b", "learner", state="waiting")["status"]}]
    threading.Timer(0.3, lambda: api.pods.__setitem__(0, replaced)).start()
    assert next(log) == "two"
    api.report(NAME, phase="Failed")
    assert list(log) == []


def test_pod_that_is_removed_before_its_log_is_read_ends_no_followed_log(api: JobApi, job: Job) -> None:
    api.released.set()
    api.report(NAME, phase="Succeeded")
    api.pods, api.logs = [pod("gone", "learner"), pod("a", "learner")], {("a", "learner"): [b"one\n"]}
    assert list(job.logs(follow=True)) == ["one"]


def test_followed_log_of_static_objects_ends_with_their_container(api: JobApi, job: Job) -> None:
    api.released.set()
    api.jobs.clear()
    api.pods, api.logs = [pod("a", "learner")], {("a", "learner"): [b"one\n"]}
    assert list(job.logs(follow=True)) == ["one"]


def test_interrupted_log_stream_raises(api: JobApi, job: Job) -> None:
    api.released.set()
    api.pods = [pod("a", "server-0", "server-1")]
    api.logs = {("a", "server-0"): [b"zero\n"], ("a", "server-1"): ["no bytes"]}  # type: ignore[list-item]
    with pytest.raises(ClusterUnavailable):
        list(job.logs(servers=True, follow=True))


def test_package_has_version_and_runs_as_module() -> None:
    assert stage2.__version__ == version("stage2")
    done = subprocess.run([sys.executable, "-m", "stage2", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"stage2 {stage2.__version__}")


def test_every_exported_name_exists() -> None:
    assert all(hasattr(stage2, name) for name in stage2.__all__ if name != "Model")
