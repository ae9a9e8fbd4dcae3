"""The command in a shell: its version, and what the shell completes once completion is installed."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from typer.testing import CliRunner

from stage2_cli.main import app

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
