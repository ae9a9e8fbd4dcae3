"""Processes that tests start without waiting for their imports: copies of fork_server.py, one for each pytest.

`start` takes the place of `subprocess.Popen` and `run` that of `subprocess.run`, for the command `stage2`, `python -m`
and `python -c`; `command_folder` has a command `stage2` for a shell. Such a process leads a session of its own and ends
with the tests. docs/testing.md says which tests start the true command lines.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from stage2_trainer.serve.server_command import UNCOMPILED
from stage2_trainer.sync.vllm.vllm_compat import SERVER_MODULE

ROOT = Path(__file__).parents[2]
# A pool of threads does not outlive a fork, and a library that is imported may start one.
# Names of models are not looked up on the network either, and PyTorch reads when it is imported what it may compile.
SERVER_ENVIRONMENT = {
    **UNCOMPILED,
    "HF_HUB_OFFLINE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
STAGE2 = str(Path(sys.executable).with_name("stage2"))
STUB = ("stage2_trainer.serve.stub.app",)
VLLM = (SERVER_MODULE, "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.qwen3_vl")
SAVING = "deepspeed"  # at a learner's first save accelerate imports it, whatever trains: 1.5 CPU seconds
LEARNER = ("stage2_trainer.learner.build", SAVING)
GRPO = ("stage2_trainer.grpo.build", SAVING)
CONTROLLER = ("stage2_controller.loop.main",)


SHELL_COMMAND = """\
#!{python} -IS
import json, os, socket, sys

request = dict(command=[{stage2!r}, *sys.argv[1:]], environment=dict(os.environ), folder=os.getcwd(), imports={imports})
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({address!r})
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    pid, code = server.recv(64), int(server.recv(64) or 1)
sys.exit(code if code >= 0 else 128 - code)
"""


class Forked:
    """A process that was forked, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._answers = answers

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when it has ended; raise subprocess.TimeoutExpired if that takes longer."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            with self._answers:
                self.returncode = int(self._answers.recv(64))
        return self.returncode


@functools.cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """Start the fork server of this process, which ends with it; return the name of its abstract socket as well."""
    address = f"\0stage2-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            cwd=ROOT,
            env={**os.environ, **SERVER_ENVIRONMENT},
            stdin=listener,
            start_new_session=True,
        )
    return address, server


def command_folder(folder: Path, *, imports: Sequence[str]) -> Path:
    """Write a command `stage2` into a folder for PATH: a shell that calls it gets copies; return the folder."""
    command = folder / "stage2"
    values = {"python": sys.executable, "stage2": STAGE2, "imports": list(imports), "address": _server()[0]}
    command.write_text(SHELL_COMMAND.format(**values))
    command.chmod(0o755)
    return folder


def start(
    command: Sequence[str | Path],
    *,
    imports: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: IO[bytes] | None = None,
    stderr: IO[bytes] | None = None,
) -> Forked:
    """Start `stage2 ...` or `python -m ...` as a copy of a process that has imported these modules."""
    null = os.open(os.devnull, os.O_RDWR)
    out = stdout.fileno() if stdout is not None else 1
    request = {
        "command": [str(word) for word in command],
        "environment": dict(os.environ if env is None else env),
        "folder": str(ROOT),
        "imports": list(imports),
    }
    answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    answers.connect(_server()[0])
    streams = [null, out, stderr.fileno() if stderr is not None else out]
    socket.send_fds(answers, [json.dumps(request).encode()], streams)
    os.close(null)
    pid = answers.recv(64)
    if not pid:
        raise RuntimeError("the fork server has ended; standard error has the reason")
    return Forked(int(pid), answers)


def run(
    command: Sequence[str | Path], *, imports: Sequence[str], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run such a process to its end; return what it wrote."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        code = start(command, imports=imports, env=env, stdout=output, stderr=errors).wait()
        texts = [file.seek(0) or file.read().decode() for file in (output, errors)]
    return subprocess.CompletedProcess(list(map(str, command)), code, *texts)
