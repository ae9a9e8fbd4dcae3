"""Exit codes of several learner processes, of real ones too; SIGTERM is a request whenever it comes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from stage2_api.errors import EXIT_CONFIG, EXIT_RETRYABLE, ConfigError
from stage2_trainer.process.torchrun import Node, joined_exit_code, run_processes
from tests.support.ports import free_port

pytestmark = pytest.mark.in_turns(3, apart=True)


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
def test_most_specific_exit_code_is_returned(codes: list[int], joined: int) -> None:
    assert joined_exit_code(codes) == joined


@pytest.mark.parametrize("code", [0, EXIT_CONFIG, EXIT_RETRYABLE])
def test_launcher_returns_exit_code_of_processes(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ends.py").write_text('"""Ends with its argument."""\nimport sys\n\nsys.exit(int(sys.argv[1]))\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_processes("ends", [str(code)], processes=2) == code


NAMED = '''"""Says which it is."""
import os, pathlib, sys

pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(sys.argv[2] + " of " + os.environ["WORLD_SIZE"])
'''
ONE_OF_SEVERAL = """
import logging, sys
from stage2_trainer.process.torchrun import Node, run_processes
logging.basicConfig(level=logging.INFO)
sys.exit(run_processes("named", sys.argv[2:], processes=2, node=Node.parse(sys.argv[1])))
"""


def machine(index: int, port: int, folder: Path, *, host: str = "127.0.0.1", count: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ONE_OF_SEVERAL, f"{index}/{count}@{host}:{port}", folder, f"machine {index}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
    )


def until_it_waits(started: subprocess.Popen[str]) -> None:
    assert started.stderr is not None
    assert any("waiting for the learner's other machines" in line for line in started.stderr)


def until(condition: Callable[[], bool], *running: subprocess.Popen[str]) -> None:
    while not condition():
        assert all(one.poll() is None for one in running)
        time.sleep(0.05)


def store_of_first(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


@pytest.mark.parametrize("restarted", [False, True])
def test_ranks_follow_machine_index(restarted: bool, tmp_path: Path) -> None:
    """restarted: a first machine that has met all processes of an earlier attempt is still there for a while."""
    (tmp_path / "named.py").write_text(NAMED)
    port = free_port()
    machines = []
    if restarted:
        earlier = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        for index in range(2):
            earlier.set(f"machine-{index}", "of the earlier attempt")
        machines.append(machine(1, port, tmp_path))
        until(lambda: earlier.get("machine-1") != b"of the earlier attempt", *machines)
        del earlier
    else:
        machines.append(machine(1, port, tmp_path))
    machines.append(machine(0, port, tmp_path))
    assert [one.communicate(timeout=200) and one.returncode for one in machines] == [0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [
        f"machine {index} of 4" for index in (0, 0, 1, 1)
    ]


def test_machine_lost_during_rendezvous_is_waited_for_again(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(NAMED)
    port = free_port()
    first, gone = (machine(index, port, tmp_path, count=3) for index in (0, 1))
    until_it_waits(first)
    calls = store_of_first(port)
    until(lambda: calls.check(["machine-1"]), first, gone)
    gone.kill()
    gone.communicate()
    until(lambda: not calls.check(["machine-1"]), first)
    last = machine(2, port, tmp_path, count=3)
    until(lambda: calls.check(["machine-2"]), first, last)
    machines = [first, last, machine(1, port, tmp_path, count=3)]
    try:
        assert [one.communicate(timeout=200) and one.returncode for one in machines] == [0, 0, 0]
    finally:
        for one in machines:
            one.kill()
            one.wait()


@pytest.mark.parametrize("text", ["2/2@h:1", "0/2", "a/2@h:1", "0/2@h", "1/2@h:70000"])
def test_invalid_machine_address_is_refused(text: str) -> None:
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


def test_processes_may_save_without_time_limit_after_sigterm(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    impatient = {"PYTHONPATH": str(tmp_path), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}  # 30 where it is not set
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, "slow", tmp_path], env={**os.environ, **impatient})
    while len(list(tmp_path.glob("*.ready"))) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.wait() == EXIT_RETRYABLE
    assert len(list(tmp_path.glob("*.saved"))) == 2


@pytest.mark.parametrize(
    ("index", "host", "first_stands_still"),
    [(0, "127.0.0.1", False), (0, "not-known-yet.invalid", False), (1, "127.0.0.1", False), (1, "127.0.0.1", True)],
)
def test_machine_waiting_for_others_stops_on_sigterm(
    index: int, host: str, first_stands_still: bool, tmp_path: Path
) -> None:
    port = free_port()
    silent = socket.create_server(("127.0.0.1", port)) if first_stands_still else None
    waiting = machine(index, port, tmp_path, host=host)
    try:
        until_it_waits(waiting)
        if silent:
            silent.accept()
        waiting.terminate()
        assert waiting.wait(timeout=30) == EXIT_RETRYABLE
    finally:
        waiting.kill()
        waiting.communicate()
    del silent


def test_cli_runs_as_module() -> None:
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


def test_repeated_signals_do_not_deadlock():
    done = subprocess.run([sys.executable, "-c", LEARNER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still answers\n", "")
