"""What a weight sync costs a learner with 1, 8 and 64 servers, phase by phase.

The servers are sinks in one process (`bench.many_sinks`): 64 that merge would share this machine's cores. Times are
those of the fastest of several syncs.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from bench.sync import (
    BUCKET_BYTES,
    LAYERS,
    RANK,
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

from stage2_api.vllm import ServerAddress
from stage2_trainer.sync.fleet.push import FullPush
from stage2_trainer.sync.fleet.report import SyncReport

COUNTS = (1, 8, 64)
RUNS = 5
PHASES = ("connect", "begin", "pack", "send", "load", "finish")


@dataclass(frozen=True)
class Taken:
    """One sync: what it says of itself, and the learner's processor time in seconds."""

    report: SyncReport
    cpu_s: float


class ManyServersTable:
    """The table, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield "\n## Weight sync to many servers\n\n"
        yield f"| what | servers | MB each | ms | growth | learner's CPU ms | {' | '.join(PHASES)} |\n"
        yield "| --- " + "| ---: " * (5 + len(PHASES)) + "|\n"
        with saved(Policy()) as (policy, folder, size):
            yield from rows(f"DoRA of rank {RANK}, merged at the servers, of {size}", adapted(policy), folder)
            yield from rows(f"{TRAINED_LAYERS} of {LAYERS} layers train, and are sent", policy, folder)
        with saved(Policy(RECIPE_WIDTH)) as (policy, folder, size):
            what = f"DoRA of rank {RECIPE_RANK}, merged at the servers, of {size}: as small a part as the recipe's"
            yield from rows(what, adapted(policy, RECIPE_RANK), folder)


def rows(what: str, model: nn.Module, folder: str) -> Iterator[str]:
    """The rows of one way to sync."""
    alone = 0.0
    for count in COUNTS:
        with many_sinks(count, folder) as (addresses, token):
            taken = fastest(model, addresses, token)
        seconds = taken.report.seconds
        alone = alone or seconds
        phases = " | ".join(f"{1e3 * taken.report.phase_seconds[phase]:.1f}" for phase in PHASES)
        amounts = f"{taken.report.bytes / 1e6:.1f} | {1e3 * seconds:.1f} | {seconds / alone:.2f}"
        yield f"| {what} | {count} | {amounts} | {1e3 * taken.cpu_s:.0f} | {phases} |\n"


def fastest(model: nn.Module, addresses: list[ServerAddress], token: str) -> Taken:
    """Sync several times, and return the fastest of those that find their groups formed."""
    sync = FullPush(addresses, token=token, timeout_s=120.0, device=torch.device("cpu"), bucket_bytes=BUCKET_BYTES)
    try:
        return min([once(sync, model, version) for version in range(RUNS + 1)][1:], key=lambda one: one.report.seconds)
    finally:
        sync.close()


def once(sync: FullPush, model: nn.Module, version: int) -> Taken:
    """Sync once."""
    start = time.process_time()
    report = sync.push(model, version=version)
    return Taken(report, time.process_time() - start)


@contextmanager
def many_sinks(count: int, model: str) -> Iterator[tuple[list[ServerAddress], str]]:
    """Start so many servers; yields where they are, and their token."""
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(token)
        environment = {**os.environ, "STAGE2_TOKEN_FILE": str(folder / "token")}
        ports = free_ports(2 * count)
        served, dialled = ports[:count], ports[count:]
        addresses = [ServerAddress(f"http://127.0.0.1:{s}", d) for s, d in zip(served, dialled, strict=True)]
        command = [sys.executable, "-m", "bench.many_sinks", model, *map(str, served)]
        process = subprocess.Popen(command, env=environment)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        wait_until_up(addresses[-1].base_url)
        yield addresses, token
