"""The commands in a shell: version, completion, logs of a run, and jobs of a cluster."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stage2_api.errors import EXIT_UNAVAILABLE, ConfigError
from stage2_cli import kubectl_plugin
from stage2_cli.cluster import JobError
from stage2_cli.jobs import jobs
from stage2_cli.main import app
from tests.unit.cli.job_api import JobApi, api_server

ROOT = Path(__file__).parents[3]

PLUGIN = Path(sys.executable).with_name("kubectl-stage2")
COMPLETER = Path(sys.executable).with_name("kubectl_complete-stage2")
STAGE2 = Path(sys.executable).with_name("stage2")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobApi]:
    with api_server(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", server.kubeconfig)
        yield server


def printed(program: Path, *words: str, stdin: str = "") -> tuple[int, str]:
    """Return the exit code of a program, and what it prints."""
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, input=stdin)
    return done.returncode, done.stdout + done.stderr


def job(*words: str) -> tuple[int, str]:
    """Return the exit code of a command about jobs, and what it prints."""
    done = CliRunner().invoke(jobs, words)
    if isinstance(done.exception, JobError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output


def test_a_job_has_the_same_verbs_in_stage2_and_in_kubectl(api: JobApi) -> None:
    file = str(ROOT / "examples" / "job-3v1-tiny.yaml")
    assert printed(STAGE2, "job", "submit", file, "--namespace=team-a", "--as=ann") == (0, "job-3v1-tiny submitted\n")
    assert api.headers[-1]["Impersonate-User"] == "ann"
    code, text = printed(PLUGIN, "list", "--all-namespaces")
    assert (code, text.split()[-2:]) == (0, ["team-a", "job-3v1-tiny"])
    commands = typer.main.get_command(app).commands
    assert list(commands["job"].commands) == list(typer.main.get_command(jobs).commands)


def test_a_job_is_watched_suspended_and_deleted_from_the_command_line(api: JobApi) -> None:
    where = "--namespace=team-a"
    api.put("team-a", "mine", {"spec": {}})
    api.report("mine", phase="Running", progress="3/9", message="step 3 of 9")
    assert job("status", "mine", where) == (
        0,
        "phase: Running\nprogress: 3/9\nnode: not reported yet\nmessage: step 3 of 9\n",
    )
    assert json.loads(job("list", where, "--json")[1]) == [
        {"namespace": "team-a", "name": "mine", "phase": "Running", "progress": "3/9"}
    ]
    assert job("wait", "mine", where, "--timeout=0") == (75, "mine is Running: step 3 of 9\n")
    assert job("explain", "mine", where)[0] == 1
    assert job("suspend", "mine", where) == (0, "")
    assert api.jobs["team-a", "mine"]["spec"]["suspend"] is True
    assert job("resume", "mine", where) == (0, "")
    api.report("mine", phase="Failed", message="out of luck")
    assert job("wait", "mine", where) == (1, "mine is Failed: out of luck")
    api.events = [{"type": "Warning", "reason": "NodeFull", "message": "\x1b[2J", "count": 2, "lastTimestamp": "x"}]
    assert "NodeFull" in job("events", "mine", where)[1]
    assert json.loads(job("events", "mine", where, "--json")[1])[0]["count"] == 2
    assert job("delete", "mine", where) == (0, "")
    assert job("delete", "mine", where) == (64, 'rolloutmatchingjobs.stage2.dev "mine" not found')


VERBS = ["status", "explain", "events", "logs", "wait", "suspend", "resume", "delete", "report"]


@pytest.mark.parametrize("words", [["list"], *([verb, "mine"] for verb in VERBS)], ids=lambda words: words[0])
def test_every_command_reports_unreachable_cluster_in_one_line_with_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    monkeypatch.setattr("stage2_cli.job.MOST_LOST", 1)
    with api_server(tmp_path) as gone:
        pass
    for kubeconfig, shown in ((gone.kubeconfig, "cannot be reached"), (str(tmp_path / "lost"), "no cluster is")):
        monkeypatch.setenv("KUBECONFIG", kubeconfig)
        monkeypatch.setattr(sys, "argv", ["kubectl-stage2", *words])
        with pytest.raises(SystemExit) as end:
            kubectl_plugin.main()
        (line,) = capsys.readouterr().err.splitlines()
        assert end.value.code == EXIT_UNAVAILABLE
        assert shown in line


def test_kubectl_completes_verbs_options_and_names_of_jobs(api: JobApi) -> None:
    api.put("default", "mine", {})
    api.put("default", "other", {})
    assert [line.split("\t")[0] for line in printed(COMPLETER, "s")[1].splitlines()] == [
        "submit",
        "status",
        "suspend",
        ":4",
    ]
    assert printed(COMPLETER, "logs", "--foll")[1].startswith("--follow")
    assert printed(COMPLETER, "logs", "")[1].split() == ["mine", "other", ":4"]
    assert printed(COMPLETER, "logs", "-n", "default", "m")[1].split() == ["mine", ":4"]
    assert printed(COMPLETER, "logs", "-n", "empty", "m")[1].split() == [":4"]


def test_completion_works_without_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "lost"))
    assert printed(COMPLETER, "logs", "") == (0, ":4\n")


def test_logs_of_local_run_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("learner", "server-0", "server-1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"of {name}\n")
    assert CliRunner().invoke(app, ["logs", str(tmp_path)]).exit_code == 0
    assert capfd.readouterr().out == "of learner\n"
    assert CliRunner().invoke(app, ["logs", str(tmp_path), "--servers"]).exit_code == 0
    assert [line for line in capfd.readouterr().out.splitlines() if "of " in line] == ["of server-0", "of server-1"]
    with pytest.raises(ConfigError, match=r"RUN: .*must be a folder with logs/learner"):
        CliRunner().invoke(app, ["logs", str(tmp_path / "lost")], catch_exceptions=False)


def test_progress_bar_states_become_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/learner.log").write_bytes(b"loads\r\n 0 %\r100 %\x1b[2J\nloaded\n")
    assert CliRunner().invoke(app, ["logs", str(tmp_path)]).exit_code == 0
    assert capfd.readouterr().out.splitlines() == ["loads", " 0 %", "100 %\\x1b[2J", "loaded"]


COMPLETE = """
stage2 --install-completion >/dev/null || exit 1
source ~/.bash_completions/stage2.sh
complete_at() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stage2_completion stage2; echo "${COMPREPLY[*]}"; }
complete_at stage2 re
complete_at stage2 learn --proc
"""


def test_version_option_prints_distribution_version():
    shown = CliRunner().invoke(app, ["--version"]).stdout
    assert re.fullmatch(rf"stage2 {re.escape(version('stage2'))}( \(commit [0-9a-f]{{12}}.*\))?\n", shown)


def test_help_is_shown_without_arguments():
    assert "Commands" in CliRunner().invoke(app, []).output


def test_bash_completes_commands_and_options(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path}
    done = subprocess.run(["bash", "-c", COMPLETE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["render report replay", "--processes"]
