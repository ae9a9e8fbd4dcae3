"""An optimizer step with 1, 8 and 64 servers and 1, 2 and 4 learner processes, against the least time of its parts.

As `bench.schedule`: servers and passes only take time, all else is the learner's own, here in as many processes as
`vllm.server.learners: sharded` runs. `python -m bench.scale_step JSON` is one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.scale_sync import environment
from bench.schedule import LOOPS, SEED, Job, expected_pipelined
from bench.slow_servers import MOST_TOKENS, SCALE_VARIABLE
from bench.sync import free_ports
from bench.timed_learner import Gpus, TimedLearner, rollouts_of, steps_of
from torch import distributed

from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import gathered, rank, world_size
from stage2_trainer.rollouts.first_process import FirstProcessRollouts
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.wire.credentials import read_token, trust
from stage2_trainer.wire.requests import Sampling

RECORDS = 10  # of each server in a step
STEPS = 4
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Layout:
    """Servers, learner processes and the GPUs that each stands for; time passes `scale` times faster."""

    servers: int
    processes: int
    gpus: int
    scale: float

    @property
    def job(self) -> Job:
        """The job that the model computes with."""
        return Job("", self.servers, self.processes * self.gpus, self.servers * RECORDS)


@dataclass(frozen=True)
class Spent:
    """What one learner process measured: seconds of the model for each step, and seconds of its processor time."""

    steps: Sequence[float]
    cpu_s: float


LAYOUTS = (
    Layout(1, 1, 1, 8.0),
    Layout(8, 1, 2, 4.0),
    Layout(8, 2, 1, 4.0),
    Layout(8, 4, 1, 4.0),
    Layout(64, 1, 16, 2.0),
    Layout(64, 2, 8, 2.0),
    Layout(64, 4, 4, 2.0),
)


class StepTable:
    """The table, in Markdown."""

    def lines(self) -> Iterator[str]:
        """The table's lines; each row is measured when it is read."""
        yield "\n## A pipelined step with many servers and learner processes, over TLS\n\n"
        columns = (
            "step s",
            "bound s",
            "step / bound",
            "by the model",
            "CPU ms a rollout: first",
            "all",
            "requests a rollout",
        )
        yield f"| servers | processes | GPUs of each | {' | '.join(columns)} | time |\n"
        yield f"|{' ---: |' * (4 + len(columns))}\n"
        for layout in LAYOUTS:
            yield row(layout)


def row(layout: Layout) -> str:
    """Run a layout, and return its line of the table."""
    with environment(tls=True):
        os.environ[SCALE_VARIABLE] = str(layout.scale)
        spent, requests = run(layout)
    job, steps = layout.job, range(1, 1 + STEPS)
    bound = sum(job.bound_s(step, cut=True) for step in steps)
    expected = sum(expected_pipelined(job, step, True) for step in steps)
    seconds, rollouts = sum(spent[0].steps), job.records * STEPS
    cpu = [1e3 * sum(one.cpu_s for one in some) / rollouts for some in (spent[:1], spent)]
    cells = [f"{one / STEPS:.1f}" for one in (seconds, bound)] + [f"{one / bound:.2f}" for one in (seconds, expected)]
    cells += [f"{one:.2f}" for one in (*cpu, requests)]
    what = (layout.servers, layout.processes, layout.gpus, *cells, f"/ {layout.scale:g}")
    return f"| {' | '.join(map(str, what))} |\n"


def run(layout: Layout) -> tuple[list[Spent], float]:
    """Run the steps of a layout; returns what each process spent, and the requests to servers for each rollout."""
    command = [sys.executable, "-m", "bench.slow_servers", str(layout.servers)]
    servers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert servers.stdout is not None
        urls = [f"https://127.0.0.1:{port}" for port in servers.stdout.readline().split()]
        told = json.dumps({"urls": urls, "layout": asdict(layout)})
        (port,) = free_ports(1)
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(layout.processes)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.scale_step", told],
                env={**os.environ, **meet, "RANK": str(number)},
                stdout=subprocess.PIPE if number == 0 else None,
                text=True,
            )
            for number in range(layout.processes)
        ]
        out, _ = processes[0].communicate()
        for process in processes:
            process.wait()
        found = json.loads(out.splitlines()[-1])
        return [Spent(**one) for one in found["spent"]], found["requests"]
    finally:
        servers.terminate()
        servers.wait()


def main(told: str) -> None:
    """Be one learner process; the first one prints what all of them measured."""
    task = json.loads(told)
    layout, urls = Layout(**task["layout"]), task["urls"]
    if layout.processes > 1:
        distributed.init_process_group("gloo")
    sampling = Sampling(MOST_TOKENS, repetition=LOOPS)
    backend = ServerBackend(urls, token=read_token(os.environ), sampling=sampling, timeout_s=TIMEOUT_S)
    learner = TimedLearner(_source(backend), Gpus(layout.gpus), layout.job.records, pipelined=True)
    learner.step(0)  # waits for its own answers
    start = time.process_time()
    seconds = list(steps_of(learner, range(1, 1 + STEPS)))
    cpu_s, requests = time.process_time() - start, _requests(urls[0])
    spent = gathered({"steps": seconds, "cpu_s": cpu_s})
    if rank() == 0:
        sys.stdout.write(json.dumps({"spent": spent, "requests": requests}) + "\n")
        sys.stdout.flush()
    os._exit(0)  # threads wait for the answers of one more step


def _source(backend: ServerBackend) -> RolloutSource:
    if world_size() == 1:
        return rollouts_of(backend, SEED)
    return FirstProcessRollouts(lambda: rollouts_of(backend, SEED), Interrupt(world_size()))


def _requests(url: str) -> float:
    """Return the requests to all servers so far, for each that asked for an answer."""
    with urllib.request.urlopen(f"{url}/weight_info", context=trust(url, os.environ)) as answer:
        found = json.load(answer)
    return float(found["requests"] / found["chats"])


if __name__ == "__main__":
    main(sys.argv[1])
