"""Blows to a learner or a server in a phase of a push: what the fault tables of the stub and of vLLM share."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stage2_trainer.weights.delivery import Delivery
from stage2_trainer.weights.packing import Packer
from stage2_trainer.weights.sync_session import SyncSession
from stage2_trainer.weights.transfer.rendezvous import Rendezvous
from stage2_trainer.wire.client import ServerClient
from tests import forked
from tests.integration.conftest import Served, free_port

PHASES = ("connect", "begin", "pack", "confirm", "finish")
BLOWS = (signal.SIGKILL, signal.SIGSTOP)

STRUCK_LEARNER = """
import os, sys, torch
from stage2_api.vllm import ServerAddress
from stage2_trainer.weights.full_sync import FullSync
from tests.integration import policies
from tests.integration.strikes import when_it_comes_to
url, port, model, token, phase, blow = sys.argv[1:]
when_it_comes_to(phase, lambda: os.kill(os.getpid(), int(blow)))
options = {"token": token, "timeout_s": 3, "device": torch.device("cpu"), "bucket_bytes": 400_000}
sync = FullSync([ServerAddress(url, int(port))], **options)
sync.sync(policies.load(model), version=1)
"""


def when_it_comes_to(phase: str, do: Callable[[], object]) -> Callable[[], None]:
    """Do something once, when the first sync that follows comes to a phase; in `pack`, to its third bucket."""
    steps: dict[str, tuple[Any, str]] = {
        "connect": (Rendezvous, "_links"),
        "begin": (SyncSession, "begin"),
        "pack": (Packer, "pack"),
        "confirm": (Delivery, "confirm"),
        "finish": (SyncSession, "finish"),
    }
    owner, name = steps[phase]
    real, calls = getattr(owner, name), []

    def step(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == (3 if phase == "pack" else 1):
            do()
        return real(*arguments, **options)

    setattr(owner, name, step)
    return lambda: setattr(owner, name, real)


@contextlib.contextmanager
def struck_learner(served: Served, model: Path, token: str, phase: str, blow: signal.Signals):
    """Let a learner of one server die, or stand still, in a phase of its push; end it with the block."""
    command = [sys.executable, "-c", STRUCK_LEARNER, served.base_url, free_port(), model, token, phase, int(blow)]
    process = forked.start(list(map(str, command)), imports=["tests.integration.strikes", "tests.integration.policies"])
    try:
        if blow == signal.SIGKILL:
            assert process.wait(timeout=120) == -signal.SIGKILL
        else:
            wait_until_stopped(process)
        yield
    finally:
        process.kill()
        process.wait(60)


def wait_until_stopped(process: forked.Forked) -> None:
    """Return once a process stands still."""
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()[0] != "T":
        assert process.poll() is None
        time.sleep(0.05)


def strike(served: Served, blow: signal.Signals) -> None:
    """Send a signal to all processes of a server."""
    os.killpg(served.process.pid, blow)


def ports_of(served: Served) -> tuple[int, int]:
    """Return a server's port and the learner's port for it."""
    return int(served.base_url.rpartition(":")[2]), served.group_port


def version_of(served: Served, token: str) -> str:
    """Return the version of the weights that a server holds."""
    client = ServerClient(served.base_url, token, timeout_s=10)
    with contextlib.closing(client):
        return client.weight_version()
