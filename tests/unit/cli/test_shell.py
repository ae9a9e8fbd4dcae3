"""The commands in a shell: version, completion, and the options that the kubectl plugin passes on."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stage2_api.errors import ConfigError
from stage2_cli.main import app

PLUGIN = str(Path(sys.executable).with_name("kubectl-stage2"))
WHERE = ["--namespace=team-a", "--context=far", "--as=ann"]


@pytest.mark.parametrize("words", [["explain", "a"], ["logs", "a"], ["logs", "a", "--servers"], ["report", "a"]])
def test_namespace_context_and_whose_rights_are_handed_on_to_kubectl(tmp_path: Path, words: list[str]) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\necho "$@" > "$0.asked"\nexit 7\n')
    kubectl.chmod(0o755)
    done = subprocess.run([PLUGIN, *words, *WHERE], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False)
    asked = (tmp_path / "kubectl.asked").read_text().split()
    assert set(WHERE) <= set(asked)
    assert done.returncode != 0


def test_the_logs_of_a_run_of_this_machine_are_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    for name in ("learner", "server-0", "server-1"):
        (tmp_path / "logs" / f"{name}.log").write_text(f"of {name}\n")
    assert CliRunner().invoke(app, ["logs", str(tmp_path)]).exit_code == 0
    assert capfd.readouterr().out == "of learner\n"
    assert CliRunner().invoke(app, ["logs", str(tmp_path), "--servers"]).exit_code == 0
    assert [line for line in capfd.readouterr().out.splitlines() if "of " in line] == ["of server-0", "of server-1"]
    with pytest.raises(ConfigError, match=r"RUN: .*must be a folder with logs/learner"):
        CliRunner().invoke(app, ["logs", str(tmp_path / "lost")], catch_exceptions=False)


def test_states_of_a_progress_bar_are_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/learner.log").write_bytes(b"loads\r\n 0 %\r100 %\x1b[2J\nloaded\n")
    assert CliRunner().invoke(app, ["logs", str(tmp_path)]).exit_code == 0
    assert capfd.readouterr().out.splitlines() == ["loads", " 0 %", "100 %\\x1b[2J", "loaded"]


@pytest.mark.parametrize("option", [["-n", "x"], ["--context", "x"], ["--as", "x"]])
def test_a_folder_of_logs_has_no_namespace_context_or_user(option: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--\w+: .*; is for a job of the cluster, and ./work is a folder"):
        CliRunner().invoke(app, ["logs", "./work", *option], catch_exceptions=False)


def test_the_logs_of_a_job_come_from_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert CliRunner().invoke(app, ["logs", "job-3v1", "--follow", *WHERE]).exit_code == 0
    asked = capfd.readouterr().out.split()
    assert {"logs", "--container=learner", "--follow", *WHERE} <= set(asked)


COMPLETE = """
stage2 --install-completion >/dev/null || exit 1
source ~/.bash_completions/stage2.sh
complete_at() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _stage2_completion stage2; echo "${COMPREPLY[*]}"; }
complete_at stage2 re
complete_at stage2 learn --proc
"""


def test_the_version_is_that_of_the_distribution():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"stage2 {version('stage2')}\n"


def test_without_arguments_the_help_is_shown():
    assert "Commands" in CliRunner().invoke(app, []).output


def test_bash_completes_commands_and_options(tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": path}
    done = subprocess.run(["bash", "-c", COMPLETE], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["render report replay", "--processes"]
