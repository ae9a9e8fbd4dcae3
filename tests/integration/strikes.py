"""Blows to a learner or a server in a phase of a push: what the fault tables of the stub and of vLLM share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from stage2_api.vllm import VllmSync
from stage2_trainer.sync.fleet.delivery import Delivery, Packer, Shipment
from stage2_trainer.sync.fleet.merge_location import MergeLocation
from stage2_trainer.sync.fleet.proof import Probe, Prover
from stage2_trainer.sync.fleet.push import FullPush, WeightSync
from stage2_trainer.sync.fleet.server import ServerSession
from stage2_trainer.sync.tensors.merge import WeightAccess
from stage2_trainer.sync.transports.transfer import WeightTransfer
from stage2_trainer.wire.client import ServerClient
from stage2_trainer.wire.errors import ServerError
from tests.integration.conftest import Served, patience
from tests.support import forked
from tests.support.ports import free_port
from tests.support.turns import is_exhaustive

BLOWS = (signal.SIGKILL, signal.SIGSTOP)
TRANSPORTS = ("tcp", "nccl")
STEPS: dict[str, tuple[Any, str]] = {
    "connect": (WeightTransfer, "_wait_for_links"),
    "begin": (ServerSession, "begin"),
    "compare folders": (MergeLocation, "compare_folder"),
    "pack": (Packer, "pack"),
    "merge": (Shipment, "digest_what_servers_merge"),  # by the learner, while servers merge
    "confirm": (Delivery, "confirm"),
    "finish": (ServerSession, "finish"),
    "proof": (Prover, "_ask_all"),
}
STRUCK_BUCKET = 3
STANDSTILL_S, KILL_S = 5.0, 30.0
LEARNER_S, LONGEST_LEARNER_S = 4.0, 12.0  # of one that is struck: its server may wait for it twice as long


@dataclass(frozen=True)
class Push:
    """What is pushed. policy: of `policies.trained`. bucket_bytes: such that there are more than three buckets."""

    name: str
    policy: str
    phases: tuple[str, ...]
    bucket_bytes: int
    how: VllmSync = field(default_factory=VllmSync)

    def options(self) -> dict[str, Any]:
        """Return these options of a full sync."""
        return {"access": WeightAccess(self.bucket_bytes), "how": self.how}


WHOLE = Push("whole", "full", ("connect", "begin", "pack", "confirm", "finish", "proof"), 400_000)
MERGED = Push("merged at the server", "dora", tuple(STEPS), 8_000, VllmSync(merge="server"))
PUSHES = {push.name: push for push in (WHOLE, MERGED)}
Case = tuple[Push, str, str, signal.Signals, str]
"""A push, its phase, the process that is struck in it, the blow, and the transport."""


def every_case(*who: str) -> list[Case]:
    """Return every blow to each of these processes, in each phase of each push, over each transport."""
    return [
        (push, phase, struck, blow, transport)
        for push in PUSHES.values()
        for phase in push.phases
        for struck in who
        for blow in BLOWS
        for transport in TRANSPORTS
    ]


def as_parameters(cases: Iterable[Case], is_tried: Callable[..., bool]) -> list[Any]:
    """Return cases as parameters of a test: those that are tried each time; all in an exhaustive run."""
    tried = [case for case in cases if is_exhaustive() or is_tried(*case)]
    return [pytest.param(*case, id=" ".join([case[0].name, *case[1:3], case[3].name, case[4]])) for case in tried]


def deadline_s(blow: signal.Signals) -> float:
    """Return the seconds that a call to a server may take: no deadline is needed to notice that one was killed."""
    return patience(STANDSTILL_S if blow == signal.SIGSTOP else KILL_S)


def proved(sync: FullPush, probe: Probe) -> WeightSync:
    """Return a synchronizer that proves each sync to every server."""
    clients = [session.client for session in sync.fleet.sessions]
    return WeightSync("full", full=sync.push, prover=Prover(probe, clients, every=1))


def when_it_comes_to(phase: str, do: Callable[[], object]) -> Callable[[], None]:
    """Do something once, when the first sync that follows comes to a phase; in `pack`, to its third bucket."""
    owner, name = STEPS[phase]
    real, calls = getattr(owner, name), []

    def step(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == (STRUCK_BUCKET if phase == "pack" else 1):
            do()
        return real(*arguments, **options)

    setattr(owner, name, step)
    return lambda: setattr(owner, name, real)


@contextlib.contextmanager
def struck_server(served: Served, phase: str, blow: signal.Signals, who: int | None = None) -> Iterator[None]:
    """Strike a server when it comes to a phase of the sync in the block, and let what was stopped go on after it.

    who: the one of its processes that is struck; None = all. A merge is struck in the middle, by the server itself.
    """

    def fall() -> None:
        if who is None:
            strike(served, blow)
        else:
            os.kill(who, blow)

    order = served.log.with_suffix(".blow")  # see `prepared_server`
    if phase == "merge":
        order.write_text(f"{int(blow)} {'server' if who is None else 'engine'}")
        undo = _seen_to(order)
    else:
        undo = when_it_comes_to(phase, fall)
    try:
        yield
    finally:
        undo()
        with contextlib.suppress(ProcessLookupError):
            strike(served, signal.SIGCONT)


def push_to_struck(
    synchronizer: WeightSync, policy: nn.Module, healthy: Served, struck: Served, phase: str, blow: signal.Signals,
    token: str, who: int | None = None,
) -> None:  # fmt: skip
    """Push version 2 while one of two servers is struck: it is named, and the other one has the weights."""
    with struck_server(struck, phase, blow, who), pytest.raises(ServerError) as caught:
        synchronizer.ensure_synced(policy, 2)
    assert caught.value.server == struck.base_url
    assert version_of(healthy, token) == "2"
    if blow == signal.SIGKILL:
        struck.process.wait(60)


def _seen_to(order: Path) -> Callable[[], None]:
    """Return a call that sees that an order was carried out."""

    def undo() -> None:
        carried_out = not order.exists()
        order.unlink(missing_ok=True)
        assert carried_out, "the server came to no merge"

    return undo


@contextlib.contextmanager
def struck_learner(
    served: Served, model: Path, token: str, push: Push, phase: str, blow: signal.Signals
) -> Iterator[None]:
    """Let a learner of one server die, or stand still, in a phase of its push; end it with the block."""
    timeout_s = deadline_s(blow) if blow == signal.SIGKILL else min(patience(LEARNER_S), LONGEST_LEARNER_S)
    with _learner(served, model, token, push, phase, timeout_s, blow=int(blow)) as process:
        if blow == signal.SIGKILL:
            assert process.wait() == -signal.SIGKILL
        else:
            wait_until_stopped(process.pid)
        yield


@contextlib.contextmanager
def waiting_learner(
    served: Served, model: Path, token: str, push: Push, phase: str, timeout_s: float, who: int | None = None
) -> Iterator[forked.Forked]:
    """Let a learner's server stand still from a phase of its push on, and the learner wait; end it with the block.

    who: the one of the server's processes that stands still; None = all.
    """
    stopped = -served.process.pid if who is None else who  # negative: a group
    with _learner(served, model, token, push, phase, timeout_s, stopped=stopped) as process:
        wait_until_stopped(abs(stopped))
        yield process


@contextlib.contextmanager
def _learner(
    served: Served, model: Path, token: str, push: Push, phase: str, timeout_s: float, **blow: int
) -> Iterator[forked.Forked]:
    arguments = {
        "base_url": served.base_url,
        "group_port": free_port(),
        "transport": served.transport,
        "dtype": served.dtype,
        "model": str(model),
        "token": token,
        "push": push.name,
        "phase": phase,
        "timeout_s": timeout_s,
        **blow,
    }
    command = [sys.executable, "-m", "tests.integration.struck_learner", json.dumps(arguments)]
    process = forked.start(command, imports=["tests.integration.strikes", "tests.integration.policies"])
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def wait_until_stopped(pid: int) -> None:
    """Return once a process stands still."""
    while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]) != "T":
        assert state != "Z"
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
    return client.weight_version()
