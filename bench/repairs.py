"""How long a deleted child stays away while another tenant keeps the controller busy: `python -m bench.repairs`.

Against the cluster that KUBECONFIG names, with the definition and its policy; the Service of one tenant's job is
deleted again and again: beside nothing, behind 1,000 jobs that another tenant has just sent, and beside 22 new ones a
second.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from statistics import median

from bench.bad_jobs import quota, refused
from bench.cluster import Watch, job, kubectl, namespace, node
from bench.operator import PARALLEL, RESULTS, SETTLED_S, Tally, controller, each, merged

from stage2_controller.cluster.api_server import Api, connect
from tests.support.tools import chosen_cluster

AT_ONCE = 1_000
A_SECOND = 22.0
STREAM_S = 40.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.repairs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repairs", type=int, default=20, metavar="N", help="for each of the first two figures")
    parser.add_argument("--write", action="store_true", help="keep the line in bench/results/operator.md")
    options = parser.parse_args(arguments)
    with chosen_cluster(), node(gpus=8):
        line = asyncio.run(repairs(options.repairs))
    if options.write:
        RESULTS.write_text(merged(RESULTS.read_text("utf-8"), [line]), encoding="utf-8")
    return 0


async def repairs(count: int) -> str:
    """The line of the results: beside nothing, behind 1,000 jobs of another tenant, and beside a stream of them."""
    api = await connect(Tally())
    seconds: dict[str, list[float]] = {}
    with namespace() as theirs, namespace() as name, controller(theirs, name):
        kubectl("apply", "-f", "-", stdin=quota(theirs))
        with Watch(name) as watch:
            await api.create(job(0, name))
            await asyncio.to_thread(watch.all, 1, 60.0)
        seconds["beside nothing"] = [await _repaired(api, name) for _ in range(count)]
        await each([refused(index, theirs) for index in range(AT_ONCE)], api.create)
        seconds[f"behind {AT_ONCE:,} jobs that another tenant has just sent"] = [
            await _repaired(api, name) for _ in range(count)
        ]
        stream = asyncio.create_task(_stream(api, theirs))
        await asyncio.sleep(SETTLED_S)
        begun = time.monotonic()
        while time.monotonic() - begun < STREAM_S:
            seconds.setdefault("beside a stream", []).append(await _repaired(api, name))
            await asyncio.sleep(1)
        stream.cancel()
        sent = await stream
    await api.close()
    rate = sent / (time.monotonic() - begun + SETTLED_S)
    seconds[f"beside {rate:.0f} new ones a second"] = seconds.pop("beside a stream")
    figures = "; ".join(f"{what} {max(some):.2f} at most (median {median(some):.2f})" for what, some in seconds.items())
    load = f"{os.cpu_count()} cores on which {os.getloadavg()[0]:.0f} processes were ready to run"
    line = f"Seconds until a Service that was deleted is there again, {load}: {figures}."
    sys.stdout.write(f"{line}\n")
    return line


async def _stream(api: Api, name: str) -> int:
    """Send jobs, so many a second as the API server takes up to A_SECOND, until cancelled; return how many."""
    sent, begun = 0, time.monotonic()
    try:
        while True:
            due = int((time.monotonic() - begun) * A_SECOND) - sent
            await each([refused(AT_ONCE + sent + index, name) for index in range(min(due, PARALLEL))], api.create)
            sent += max(min(due, PARALLEL), 0)
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return sent


async def _repaired(api: Api, name: str) -> float:
    """Delete the Service of job-0; return the seconds until there is another one."""
    there = await api.get("Service", name, "job-0-rollout")
    assert there
    uid = there["metadata"]["uid"]
    started = time.monotonic()
    await api.delete("Service", name, "job-0-rollout", uid=uid)
    while not (found := await api.get("Service", name, "job-0-rollout")) or found["metadata"]["uid"] == uid:
        await asyncio.sleep(0.02)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
