"""Exit codes of several learner processes, of real ones too."""

import subprocess
import sys
from pathlib import Path

import pytest

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE
from stage2_trainer.process.torchrun import joined_exit_code, run_processes


@pytest.mark.parametrize(
    ("codes", "joined"),
    [
        ([1, EXIT_CONFIG], EXIT_CONFIG),
        ([EXIT_RETRYABLE, EXIT_CONFIG], EXIT_CONFIG),
        ([-15, EXIT_RETRYABLE], EXIT_RETRYABLE),
        ([-9], 1),
        ([1, 3], 3),
    ],
)
def test_the_code_that_tells_most_is_returned(codes: list[int], joined: int) -> None:
    assert joined_exit_code(codes) == joined


@pytest.mark.parametrize("code", [0, EXIT_CONFIG, EXIT_RETRYABLE])
def test_what_the_processes_end_with_is_what_their_launcher_returns(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text('"""Ends with its argument."""\nimport sys\n\nsys.exit(int(sys.argv[1]))\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_processes("ends", [str(code)], processes=2) == code


def test_the_command_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "stage2_cli", "--help"], capture_output=True, text=True, check=False)
    assert "learn" in done.stdout
