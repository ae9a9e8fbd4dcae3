"""What a weight sync costs a learner with 1, 8 and 64 servers, and what one server that is lost costs the others.

The servers are sinks in one process (`bench.many_sinks`): 64 that merge would share this machine's cores. Times are
those of the fastest of several syncs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench.many_sinks import HOST, SPENT_ROUTE
from bench.sync import (
    BUCKET_BYTES,
    LAYERS,
    RECIPE_RANK,
    RECIPE_WIDTH,
    TRAINED_LAYERS,
    Policy,
    adapted,
    free_ports,
    saved,
    wait_until_up,
)
from torch import nn

from stage2_api.pod.layout import (
    TLS_CA_FILE_VARIABLE,
    TLS_CERT_FILE_VARIABLE,
    TLS_KEY_FILE_VARIABLE,
    TOKEN_FILE_VARIABLE,
)
from stage2_api.vllm import ServerAddress
from stage2_controller.job import credentials
from stage2_trainer.sync.fleet.push import FullPush
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.tensors.merge import WeightAccess
from stage2_trainer.wire.errors import ServerError

COUNTS = (1, 8, 64)
RUNS = 5
PHASES = ("begin", "pack", "send", "load", "finish")
TIMEOUT_S = 120.0
PATIENCE_S = 5.0  # of a learner whose servers are struck; `vllm.server.timeout_s` of a job


@dataclass(frozen=True)
class Taken:
    """One sync: what it says of itself, seconds of processor time of both sides, and requests to servers."""

    report: SyncReport
    learner_s: float
    servers_s: float
    requests: int


@dataclass(frozen=True)
class Sinks:
    """Servers that take anything: where they are, and the token."""

    addresses: Sequence[ServerAddress]
    token: str

    def push(self, timeout_s: float = TIMEOUT_S) -> FullPush:
        """Return a learner's side; the caller closes it."""
        options: dict[str, Any] = {"timeout_s": timeout_s, "device": torch.device("cpu")}
        return FullPush(self.addresses, token=self.token, access=WeightAccess(BUCKET_BYTES), **options)

    def spent(self) -> tuple[float, int]:
        """Return seconds of processor time, and requests, of the process that the first server is in."""
        with urllib.request.urlopen(self.addresses[0].base_url + SPENT_ROUTE, context=_trust()) as answer:
            found = json.load(answer)
        return found["cpu_s"], found["requests"]


class SyncTable:
    """The table of syncs, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield "\n## Weight sync to many servers\n\n"
        columns = ("MB from the learner", "ms", "growth", "learner's CPU ms", "servers' CPU ms", "requests", *PHASES)
        yield f"| what | servers | TLS | {' | '.join(columns)} |\n"
        yield f"| --- | ---: | --- |{' ---: |' * len(columns)}\n"
        for tls in (False, True):
            with saved(Policy(RECIPE_WIDTH)) as (policy, folder, size):
                what = f"DoRA of rank {RECIPE_RANK}, merged at the servers, of {size}"
                yield from rows(what, adapted(policy, RECIPE_RANK), folder, tls=tls)
            with saved(Policy()) as (policy, folder, _):
                yield from rows(f"{TRAINED_LAYERS} of {LAYERS} layers train, and are sent", policy, folder, tls=tls)


def rows(what: str, model: nn.Module, folder: str, *, tls: bool) -> Iterator[str]:
    """The rows of one way to sync."""
    alone = 0.0
    for count in COUNTS:
        with sinks(count, folder, tls=tls) as servers:
            one = fastest(model, servers)
        seconds = one.report.seconds
        alone = alone or seconds
        phases = [f"{1e3 * one.report.phase_seconds[phase]:.0f}" for phase in PHASES]
        amounts = [f"{one.report.wire_bytes / 1e6:.0f}", f"{1e3 * seconds:.0f}", f"{seconds / alone:.2f}"]
        costs = [f"{1e3 * one.learner_s:.0f}", f"{1e3 * one.servers_s:.0f}", f"{one.requests}"]
        yield f"| {what} | {count} | {'yes' if tls else 'no'} | {' | '.join([*amounts, *costs, *phases])} |\n"


def fastest(model: nn.Module, servers: Sinks) -> Taken:
    """Sync several times, and return the fastest of those that find their groups formed."""
    sync = servers.push()
    try:
        taken = [once(sync, model, version, servers) for version in range(RUNS + 1)]
        return min(taken[1:], key=lambda one: one.report.seconds)
    finally:
        sync.close()


def once(sync: FullPush, model: nn.Module, version: int, servers: Sinks) -> Taken:
    """Sync once."""
    cpu_s, requests = servers.spent()
    start = time.process_time()
    report = sync.push(model, version=version)
    learner_s = time.process_time() - start
    after_s, after = servers.spent()
    return Taken(report, learner_s, after_s - cpu_s, after - requests)


@contextmanager
def sinks(count: int, model: str, *, tls: bool) -> Iterator[Sinks]:
    """Start so many servers in one process, with an environment that this process shares."""
    with environment(tls=tls) as token, ExitStack() as stack:
        addresses = free_addresses(count, tls=tls)
        stack.enter_context(sink_process(model, addresses))
        yield Sinks(addresses, token)


def free_addresses(count: int, *, tls: bool) -> list[ServerAddress]:
    """Return so many addresses that nothing uses."""
    ports = free_ports(2 * count)
    scheme = "https" if tls else "http"
    return [ServerAddress(f"{scheme}://{HOST}:{s}", d) for s, d in zip(ports[:count], ports[count:], strict=True)]


@contextmanager
def sink_process(model: str, addresses: Sequence[ServerAddress]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the servers of these addresses in one process; yields it once they answer."""
    ports = [address.base_url.rpartition(":")[2] for address in addresses]
    process = subprocess.Popen([sys.executable, "-m", "bench.many_sinks", model, *ports])
    try:
        wait_until_up(addresses[-1].base_url, _trust())
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def environment(*, tls: bool) -> Iterator[str]:
    """Give this process and its children a token, and a job's certificates if wanted; yields the token."""
    token = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ):
        folder = Path(name)
        (folder / "token").write_text(token)
        os.environ[TOKEN_FILE_VARIABLE] = str(folder / "token")
        if tls:
            files = credentials.new({"rollout": (HOST,)}, datetime.now(UTC))
            variables = {
                TLS_CA_FILE_VARIABLE: "ca.crt",
                TLS_CERT_FILE_VARIABLE: "rollout.crt",
                TLS_KEY_FILE_VARIABLE: "rollout.key",
            }
            for variable, file in variables.items():
                (folder / file).write_text(files[file])
                os.environ[variable] = str(folder / file)
        yield token


def _trust() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=os.environ.get(TLS_CA_FILE_VARIABLE))


class LostTable:
    """The table of one server that is lost, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield "\n## One of many servers is lost, and comes back\n\n"
        yield f"`timeout_s` is {PATIENCE_S:g}; ms of the sync before, of the one that finds the server lost, and of the"
        yield " one when it is back; over TLS.\n\n"
        yield "| servers | what happens to one | before | lost | back |\n| ---: | --- | ---: | ---: | ---: |\n"
        with saved(Policy(RECIPE_WIDTH)) as (policy, folder, _):
            model = adapted(policy, RECIPE_RANK)
            for count in COUNTS[1:]:
                for what, blow in (("its process ends", signal.SIGKILL), ("it stands still", signal.SIGSTOP)):
                    whole, lost, regained = struck(model, folder, count, blow)
                    cells = [f"{1e3 * seconds:.0f}" for seconds in (whole, lost, regained)]
                    yield f"| {count} | {what} | {' | '.join(cells)} |\n"


def struck(model: nn.Module, folder: str, count: int, blow: signal.Signals) -> tuple[float, float, float]:
    """Return the seconds of a sync before one server is struck, after that, and when it is back."""
    with environment(tls=True) as token, ExitStack() as stack:
        addresses = free_addresses(count, tls=True)
        stack.enter_context(sink_process(folder, addresses[:-1]))
        servers = Sinks(addresses, token)
        with sink_process(folder, addresses[-1:]) as victim:
            sync = servers.push(PATIENCE_S)
            stack.callback(sync.close)
            sync.push(model, version=0)
            whole = _seconds(sync, model, 1)
            victim.send_signal(blow)
            lost = _seconds(sync, model, 2)
        with sink_process(folder, addresses[-1:]):
            return whole, lost, _seconds(sync, model, 3)


def _seconds(sync: FullPush, model: nn.Module, version: int) -> float:
    start = time.monotonic()
    with suppress(ServerError):
        sync.push(model, version=version)
    return time.monotonic() - start
