"""Exit codes of several learner processes, of real ones too; SIGTERM is a request whenever it comes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError
from stage2_trainer.process.torchrun import Node, joined_exit_code, run_processes
from tests.ports import free_port


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
def test_the_most_specific_code_is_returned(codes: list[int], joined: int) -> None:
    assert joined_exit_code(codes) == joined


@pytest.mark.parametrize("code", [0, EXIT_CONFIG, EXIT_RETRYABLE])
def test_a_launcher_returns_what_processes_end_with(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text('"""Ends with its argument."""\nimport sys\n\nsys.exit(int(sys.argv[1]))\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_processes("ends", [str(code)], processes=2) == code


def test_the_processes_of_several_machines_are_numbered_by_their_machine(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        '"""Says which it is."""\nimport os, pathlib, sys\n\n'
        'pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(sys.argv[2] + " of " + os.environ["WORLD_SIZE"])\n'
    )
    port = free_port()
    launch = "import sys; from stage2_trainer.process.torchrun import *; sys.exit(run_processes('named', sys.argv[2:], "
    launch += "processes=2, node=Node.parse(sys.argv[1])))"
    machines = [
        subprocess.Popen(
            [sys.executable, "-c", launch, f"{index}/2@127.0.0.1:{port}", tmp_path, f"machine {index}"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        )
        for index in (1, 0)
    ]
    assert [machine.wait(timeout=200) for machine in machines] == [0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [
        f"machine {index} of 4" for index in (0, 0, 1, 1)
    ]


@pytest.mark.parametrize("text", ["2/2@h:1", "0/2", "a/2@h:1", "0/2@h"])
def test_a_machine_that_is_none_of_the_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="INDEX/COUNT@HOST:PORT"):
        Node.parse(text)


SLOW = '''"""Takes its time to end."""
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(3)
    pathlib.Path(sys.argv[1], os.environ["RANK"] + ".saved").touch()
    sys.exit(75)

signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], os.environ["RANK"] + ".ready").touch()
while True:
    time.sleep(1)
'''
LAUNCH = """
import sys
from stage2_trainer.process.torchrun import run_processes
sys.exit(run_processes(sys.argv[1], sys.argv[2:], processes=2))
"""


def test_processes_that_are_asked_to_stop_may_save_for_as_long_as_it_takes(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    impatient = {"PYTHONPATH": str(tmp_path), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}  # 30 where it is not set
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, "slow", tmp_path], env={**os.environ, **impatient})
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait() == EXIT_RETRYABLE
    assert len(list(tmp_path.glob("*.saved"))) == 2


ALONE = """
import logging, sys
from stage2_trainer.process.torchrun import Node, run_processes
logging.basicConfig(level=logging.INFO)
sys.exit(run_processes("none", [], processes=1, node=Node.parse(sys.argv[1])))
"""


@pytest.mark.parametrize("machine", ["0/2@127.0.0.1", "0/2@not-known-yet.invalid", "1/2@127.0.0.1"])
def test_a_machine_that_waits_for_the_others_may_be_asked_to_stop(machine: str) -> None:
    where = f"{machine}:{free_port()}"
    with subprocess.Popen([sys.executable, "-c", ALONE, where], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("waits for the learner's other machines" in line for line in process.stderr)
        time.sleep(4)  # until it waits, or has given up
        process.terminate()
        try:
            assert process.wait(timeout=30) == EXIT_RETRYABLE
        finally:
            process.kill()


def test_the_command_can_be_run_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "stage2_cli", "--help"], capture_output=True, text=True, check=False)
    assert "learn" in done.stdout


SIGNALS = 200_000  # of these some come while the one before is being taken
LEARNER = f"""
import os, subprocess, sys
from stage2_trainer.process.interrupt import Interrupt

Interrupt().listen()
shower = "import os, signal, sys\\nfor _ in range({SIGNALS}): os.kill(int(sys.argv[1]), signal.SIGTERM)"
sender = subprocess.Popen([sys.executable, "-c", shower, str(os.getpid())])
while sender.poll() is None:
    pass
print("still answers")
"""


def test_signals_that_come_while_one_is_taken_block_nothing():
    done = subprocess.run([sys.executable, "-c", LEARNER], capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still answers\n", "")
