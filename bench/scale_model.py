"""A step and its weight sync on 8 to 512 GPUs, modelled: what `bench.scale_sync` and `bench.scale_step` measured, the
model of `bench.schedule`, and real networks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench import sync_model
from bench.schedule import Job

GPUS = (8, 16, 32, 64, 128, 256, 512)
SERVERS_OF_8 = 7  # the learner has the eighth
RECORDS = 32  # of each server in a step
STEPS = 4
RANKS = (16, 32, 64)
LINKS = {"25 Gbit/s": 25e9 / 8, "100 Gbit/s": 100e9 / 8, "400 Gbit/s": 400e9 / 8}
ALL_WEIGHTS = 17.5e9  # bytes of an 8B in bfloat16
ENOUGH = 0.1  # of a step, that a sync may take


@dataclass(frozen=True)
class Measured:
    """Seconds that were measured on two CPU cores, over TLS.

    call: of an update's nine requests to a server, 2.5 times the 4.6 ms that three took. encrypt: of a byte, on one
    thread. ask: the learner's processor time for a rollout. merge: at the servers with 16 threads, by
    `bench.sync_model`; a GPU's was not measured.
    """

    call: float = 11.6e-3
    encrypt: float = 1 / 1.7e9
    ask: float = 3.6e-3
    merge: float = 0.8


MEASURED = Measured()


def adapter_s(servers: int, rank: int, link: float, *, threads: int = 16) -> float:
    """Return the seconds of a sync of an adapter of all linear layers, sent to all servers at once.

    link: bytes a second that leave the learner. threads: that encrypt.
    """
    sent = servers * sync_model.adapter_bytes(rank)
    return MEASURED.merge + servers * MEASURED.call + sent * max(1 / link, MEASURED.encrypt / threads)


def enough_for(rank: int, link: float, step_s: float) -> int:
    """Return the number of servers up to which sending an adapter to all at once takes a tenth of a step."""
    return int((ENOUGH * step_s - MEASURED.merge) / (adapter_s(1, rank, link) - MEASURED.merge))


def job_of(gpus: int) -> Job:
    """Return the layout of so many GPUs."""
    servers = gpus * SERVERS_OF_8 // 8
    return Job("", servers, gpus - servers, servers * RECORDS)


def step_s(gpus: int) -> float:
    """Return the bound of a step, the mean of several."""
    return sum(job_of(gpus).bound_s(step, cut=True) for step in range(STEPS)) / STEPS


class ModelTable:
    """The tables, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The tables' lines."""
        yield "\n## 8 to 512 GPUs, modelled, not measured\n\n"
        rank = RANKS[1]
        size = f"{sync_model.adapter_bytes(rank) / 1e6:.0f} MB"
        yield f"Of eight GPUs seven serve and one learns; {RECORDS} records a server and step; 8B as in `schedule`.\n"
        yield f"Adapter: rank {rank}, all linear layers, float32, {size}, to all servers at once. "
        yield f"Everything: {ALL_WEIGHTS / 1e9:g} GB, over one NCCL group, and without it.\n"
        yield f"{MEASURED}. Seconds.\n\n"
        adapters = [f"adapter, {name}" for name in LINKS]
        columns = (*adapters, "everything, one group, 100 Gbit/s", "without it", "CPU to ask")
        yield f"| GPUs | servers | step's bound | {' | '.join(columns)} |\n|{' ---: |' * (3 + len(columns))}\n"
        fast = LINKS["100 Gbit/s"]
        for gpus in GPUS:
            job = job_of(gpus)
            times = [adapter_s(job.servers, rank, link) for link in LINKS.values()]
            times += [ALL_WEIGHTS / fast, job.servers * ALL_WEIGHTS / fast, job.records * MEASURED.ask]
            yield f"| {gpus} | {job.servers} | {step_s(gpus):.0f} | {' | '.join(f'{one:.1f}' for one in times)} |\n"
        step = step_s(GPUS[3])
        yield f"\nServers up to which an adapter sent to all at once takes a tenth of a step of {step:.0f} s:\n\n"
        yield f"| rank | MB | {' | '.join(LINKS)} |\n| ---: | ---: |{' ---: |' * len(LINKS)}\n"
        for rank in RANKS:
            counts = [enough_for(rank, link, step) for link in LINKS.values()]
            yield f"| {rank} | {sync_model.adapter_bytes(rank) / 1e6:.0f} | {' | '.join(map(str, counts))} |\n"
