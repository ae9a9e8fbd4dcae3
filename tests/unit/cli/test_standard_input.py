"""`-` is standard input where a YAML file is read."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "job-3v1-tiny.yaml"


def stage2(*words: str, stdin: str) -> tuple[int, str]:
    """Return the exit code of a command, and what it prints."""
    command = [sys.executable, "-m", "stage2", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=stdin)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("command", "shown"), [("validate", "-: valid RolloutMatchingJob"), ("render", "Deployment")])
def test_a_job_is_read_from_standard_input(command: str, shown: str) -> None:
    code, printed = stage2(command, "-", stdin=JOB.read_text(encoding="utf-8"))
    assert code == 0, printed
    assert shown in printed


def test_an_empty_standard_input_is_refused() -> None:
    code, printed = stage2("validate", "-", stdin="")
    assert code == 64
    assert "must hold a YAML mapping, and is empty" in printed
