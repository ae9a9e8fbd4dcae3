"""The controller under load: `python -m bench.operator --jobs 1 100 1000`, against the cluster that KUBECONFIG names.

Jobs are created as quickly as the API server takes them, for one node that only exists as an object. Measured is the
time from a job's creation to that of its servers (the Deployment, the last of its children), beside two limits: a plain
client that creates those children without the learner's Job, and one that sends all that a controller must. Nothing
else should run on the cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench import jobset
from bench.bad_jobs import quota, refused
from bench.cluster import NODE, Object, Watch, clear, job, kubectl, namespace, node, until

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children
from stage2_controller.cluster.api_server import Api, connect
from stage2_controller.report.explanation import Event
from stage2_controller.state import conditions
from stage2_controller.state.conditions import Condition
from tests.support.tools import chosen_cluster

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "operator.md"
PARALLEL = 16
QUIET_S = 20.0
SETTLED_S = 5.0
OF_A_ROUND = 100
FOREIGN_S = 300.0
OF_OTHERS = "stage2.dev/bench-other"
Create = Callable[[Object], Awaitable[object]]


@dataclass(frozen=True)
class Result:
    """One run: seconds for each job, and what the controller used (None for the plain client)."""

    who: str
    seconds: Sequence[float]
    all_s: float
    requests: float | None
    cpu_s: float | None = None
    rss_mb: tuple[float, float] | None = None  # when the controller was ready, and at the end
    quiet_writes: float | None = None

    def row(self) -> str:
        """The table's line."""

        def shown(value: float | None) -> str:
            return "–" if value is None else f"{value:.1f}"

        ordered = sorted(self.seconds)
        p50, p99 = (ordered[min(int(len(ordered) * share), len(ordered) - 1)] for share in (0.5, 0.99))
        memory = "–" if self.rss_mb is None else f"{self.rss_mb[0]:.0f} → {self.rss_mb[1]:.0f}"
        asked = None if self.requests is None else self.requests / len(ordered)
        used = f"{shown(self.cpu_s)} | {memory} | {shown(self.quiet_writes)}"
        return f"| {len(ordered)} | {self.who} | {p50:.2f} | {p99:.2f} | {self.all_s:.1f} | {shown(asked)} | {used} |"


_WHO = ("plain", "alike", "controlled", "jobsets")
HEAD = (
    "| jobs | who | p50 s | p99 s | all s | requests/job | CPU s | memory MB | writes in a quiet window |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


ABOUT = """\
`python -m bench.operator --jobs 1 100 1000 --catch-up 1000 --rounds 3 --foreign 0 10000 --nodes 500 --write`, and with
`--who jobsets` after `local-cluster enable jobset`. Seconds from a job's creation to that of its last child; all jobs
are created as quickly as the API server takes them, and wait for one another. The plain client creates five of the six
children, all but the learner's Job, 16 jobs at a time, so its p50 and p99 hold no waiting (compare `all s`), with no
status, no events and nobody to watch them: the makers of the learners' pods have nothing to do. "All that a controller
sends": it creates the jobs too, all six children, and writes a status and an event for each: what the API server and
the makers of pods need for our jobs on these cores, and so the limit of any controller here. JobSet (v0.10.1, its own
program and manifests, in a pod) makes two objects of the same pods before servers answer, a headless Service and the
rollout's Job, where our controller makes six (Secret, ConfigMap, Service, NetworkPolicy, learner's Job, Deployment),
chooses the node and keeps its promise; requests for its lease are not counted. "started late": the jobs exist before
the controller, and the clock starts when it is ready. Our CPU includes the start of Python (1.5 s); memory is resident,
at first and at the end; the quiet window is 20 s, "–" where it was not looked for or did not come within two minutes.
"behind bad jobs": the jobs are sent when a tenant of another namespace has just sent so many that the controller must
refuse (`--bad 10000`), of six kinds: the host's network, nested deep, unknown fields, wrong types, and such whose
children a quota refuses, every fiftieth of 100 kB (the row below is of the first kind alone). "Seconds until": a
Service of one tenant's job is deleted while another tenant sends such jobs (`python -m bench.repairs --write`). 1,000
jobs are 1,000 pods of three servers on one node without a kubelet."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.operator", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 100, 1000])
    parser.add_argument("--who", choices=_WHO, nargs="+", default=("plain", "alike", "controlled"))
    parser.add_argument(
        "--catch-up", type=int, default=0, metavar="N", help="N jobs exist before the controller starts"
    )
    parser.add_argument(
        "--rounds", type=int, default=0, metavar="N", help=f"memory over N rounds of {OF_A_ROUND} jobs that come and go"
    )
    parser.add_argument(
        "--foreign", type=int, nargs="*", default=[], metavar="N", help="peak memory beside N pods of others, no job"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="over which the pods of others are spread")
    parser.add_argument(
        "--bad", type=int, default=0, metavar="N", help="the same jobs behind N of another namespace that are refused"
    )
    parser.add_argument("--write", action="store_true", help="keep the table in bench/results/operator.md")
    options = parser.parse_args(arguments)
    with chosen_cluster(), node(gpus=4 * max(*options.jobs, options.catch_up, OF_A_ROUND)):
        sys.stdout.write(f"{HEAD}\n")
        for line in measured(options):
            if options.write:
                before = RESULTS.read_text("utf-8") if RESULTS.exists() else ""
                RESULTS.write_text(merged(before, [line]), encoding="utf-8")
    return 0


def measured(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the results, each as soon as it is known."""
    for count in options.jobs:
        for run in (plain, alike, controlled, jobsets):
            if run.__name__ in options.who:
                yield asyncio.run(run(count))
    if options.catch_up:
        yield asyncio.run(controlled(options.catch_up, late=True))
    if options.bad:
        yield asyncio.run(behind_bad(max(options.jobs), options.bad))
    if options.rounds:
        yield asyncio.run(rounds(options.rounds))
    if options.foreign:
        yield asyncio.run(foreign(options.foreign, options.nodes))


_NOTES = ("Memory in MB", "Peak memory in MB", "Seconds until")


def merged(before: str, measured: Sequence[str]) -> str:
    """The file of results: rows measured now replace those of the same number and kind, the others stay."""
    rows = {tuple(line.split("|")[1:3]): line for line in before.splitlines() if re.match(r"\| \d", line)}
    old = [line for line in before.splitlines() if line.startswith(_NOTES)]
    rows |= {tuple(line.split("|")[1:3]): line for line in measured if line.startswith("|")}
    new = [line for line in measured if line.startswith(_NOTES)]
    notes = sorted(new + [line for line in old if line[:6] not in {one[:6] for one in new}])
    table = [rows[key] for key in sorted(rows, key=lambda key: (int(key[0]), key[1][::-1]))]
    return "\n\n".join(["# The controller under load", ABOUT, "\n".join([HEAD, *table]), *notes, _where()]) + "\n"


def _printed_row(result: Result) -> str:
    sys.stdout.write(f"{result.row()}\n")
    sys.stdout.flush()
    return result.row()


async def plain(count: int) -> str:
    """A client that makes the children of `count` jobs without a controller."""
    tally = Tally()
    api = await connect(tally)
    with namespace() as name:
        made = [
            static_children(parse_job(job(index, name)), namespace=name, content={"token": "t"})
            for index in range(count)
        ]
        children = [[child for child in one if child["kind"] != "Job"] for one in made]
        started = time.monotonic()
        seconds = await each(children, lambda one: _create_all(api, one))
        row = _printed_row(Result("plain client", seconds, time.monotonic() - started, tally.total))
    await api.close()
    return row


async def alike(count: int) -> str:
    """The limit of a controller: a client that sends for each job all that a controller must, from the job itself on.

    Those are the job, six children with the learner's Job, one status of its size, and the events of it; all of it
    without a look at what is there. The cluster creates the rest, such as pods, at the same time.
    """
    tally = Tally()
    api = await connect(tally)
    with namespace() as name:
        jobs = [job(index, name) for index in range(count)]
        made = [static_children(parse_job(one), namespace=name, content={"token": "t"}) for one in jobs]
        started = time.monotonic()
        seconds = await each(list(zip(jobs, made, strict=True)), lambda one: _create_with_status(api, *one))
        row = _printed_row(
            Result("plain client, all that a controller sends", seconds, time.monotonic() - started, tally.total)
        )
    await api.close()
    return row


async def controlled(count: int, *, late: bool = False) -> str:
    """`count` jobs and a controller; `late`: it starts when they exist already, and the clock starts with it."""
    api = await connect(Tally())
    with namespace() as name:
        jobs = [job(index, name) for index in range(count)]
        if late:
            await each(jobs, api.create)
        with controller(name) as figures, Watch(name) as watch:
            born = [time.monotonic()] * count
            started, before = time.monotonic(), figures()
            if not late:
                born = await _births(api.create, jobs)
            seen = await asyncio.to_thread(watch.all, count, 600.0)
            all_s = time.monotonic() - started
            seconds = [seen[f"job-{index}-rollout"] - born[index] for index in range(count)]
            after = None if late else await _settled(figures)
            await asyncio.sleep(QUIET_S if after else 0)
            end = figures()
        result = Result(
            "controller, started late" if late else "controller",
            seconds,
            all_s,
            requests(after or end) - (0 if late else requests(before)),
            cpu_s=(after or end)["process_cpu_seconds_total"],
            rss_mb=(memory(before), memory(end)),
            quiet_writes=writes(end) - writes(after) if after else None,
        )
        row = _printed_row(result)
    await api.close()
    return row


async def behind_bad(count: int, bad: int) -> str:
    """`count` jobs that are sent when a tenant of another namespace has just sent `bad` ones that must be refused."""
    api = await connect(Tally())
    with namespace() as theirs, namespace() as name, controller(theirs, name) as figures, Watch(name) as watch:
        before = figures()
        kubectl("apply", "-f", "-", stdin=quota(theirs))
        await each([refused(index, theirs) for index in range(bad)], api.create)
        sys.stdout.write(f"{figures()['stage2_queue_depth']:,.0f} of the bad jobs are not looked at yet\n")
        started = time.monotonic()
        born = await _births(api.create, [job(index, name) for index in range(count)])
        seen = await asyncio.to_thread(watch.all, count, 900.0)
        all_s = time.monotonic() - started
        seconds = [seen[f"job-{index}-rollout"] - born[index] for index in range(count)]
        end = figures()
        who = f"controller, behind {bad:,} bad jobs of another namespace"
        used = end["process_cpu_seconds_total"]
        row = _printed_row(Result(who, seconds, all_s, None, cpu_s=used, rss_mb=(memory(before), memory(end))))
    await api.close()
    return row


async def jobsets(count: int) -> str:
    """`count` JobSets of the same pods, through JobSet's own controller (`local-cluster enable jobset`)."""
    with namespace() as name, jobset.figures() as figures, Watch(name, "jobs") as watch:
        idle = figures()
        await asyncio.sleep(QUIET_S)  # it renews its lease all the time: those requests are no job's
        before = figures()
        a_second = (_REST(before) - _REST(idle)) / QUIET_S
        async with jobset.creator() as create:
            started = time.monotonic()
            born = await _births(create, [jobset.jobset(index, name) for index in range(count)])
        seen = await asyncio.to_thread(watch.all, count, 600.0)
        all_s = time.monotonic() - started
        await asyncio.sleep(SETTLED_S)
        end = figures()
        asked = _REST(end) - _REST(before) - a_second * (time.monotonic() - started)
        seconds = [seen[jobset.child(index)] - born[index] for index in range(count)]
        used = end["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]
        return _printed_row(Result("JobSet", seconds, all_s, asked, cpu_s=used, rss_mb=(memory(before), memory(end))))


_REST = itemgetter("rest_client_requests_total")


async def rounds(count: int) -> str:
    """The controller's memory while jobs come and go: flat, if nothing of them stays behind."""
    api = await connect(Tally())
    megabytes = []
    with namespace() as name, controller(name) as figures:
        megabytes.append(memory(figures()))
        for _ in range(count):
            with Watch(name) as watch:
                await _births(api.create, [job(index, name) for index in range(OF_A_ROUND)])
                await asyncio.to_thread(watch.all, OF_A_ROUND, 300.0)
            await asyncio.to_thread(until, lambda: _empty(name), timeout_s=300.0)
            megabytes.append(memory(figures()))
    await api.close()
    line = f"Memory in MB at the start and after each of {count} rounds of {OF_A_ROUND} jobs that came and went: "
    line += ", ".join(f"{figure:.0f}" for figure in megabytes) + "."
    sys.stdout.write(f"{line}\n")
    return line


async def foreign(counts: Sequence[int], nodes: int) -> str:
    """The controller's peak memory beside pods of others on so many nodes, for five minutes from its start.

    Those hold its first lists, its second ones, and a second watch on all pods.
    """
    api = await connect(Tally())
    peaks, there = [], 0
    names = [NODE, *(f"{NODE}-{number}" for number in range(1, nodes))]
    try:
        listed = {"apiVersion": "v1", "kind": "List", "items": [_foreign_node(one) for one in names[1:]]}
        kubectl("create", "-f", "-", stdin=listed)
        with namespace() as name:
            for count in sorted(counts):
                added = [_foreign_pod(number, name, names[number % nodes]) for number in range(there, count)]
                await each(added, api.create)
                there = count
                with controller() as figures:
                    await asyncio.sleep(FOREIGN_S)
                    peaks.append(f"{count:,} pods {figures()['peak_mb']:.0f}")
    finally:
        kubectl("delete", "node", "-l", f"{OF_OTHERS}=true", "--wait=false")
        await api.close()
    spread = f", {nodes} nodes" if nodes > 1 else ""
    line = f"Peak memory in MB within five minutes of the start, no job{spread}: {', '.join(peaks)}."
    sys.stdout.write(f"{line}\n")
    return line


def _foreign_node(name: str) -> Object:
    """A node of some 8 kB, as a cloud's are: with its labels and the images that it keeps."""
    labels = {OF_OTHERS: "true", **{f"cloud.example/label-{index}": "x" * 30 for index in range(20)}}
    images = [{"names": [f"registry.example/{'x' * 40}:{index}"], "sizeBytes": 10**9} for index in range(50)]
    amounts = {"cpu": "64", "memory": "1Ti", "pods": "250", "nvidia.com/gpu": "8"}
    ready = {"type": "Ready", "status": "True", "reason": "Bench", "message": "no kubelet"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready], "images": images}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def _foreign_pod(number: int, name: str, on: str) -> Object:
    """A pod of some 5 kB that somebody else runs on a node of the benchmark."""
    env = [{"name": f"VARIABLE_{index}", "value": "x" * 60} for index in range(30)]
    container = {"name": "c", "image": "foreign", "env": env, "resources": {"requests": {"cpu": "1m"}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"foreign-{number}", "namespace": name, "annotations": {"note": "x" * 1000}},
        "spec": {"nodeName": on, "containers": [container], "automountServiceAccountToken": False},
    }


def _empty(name: str) -> bool:
    return clear(name) and not kubectl("-n", name, "get", _ALL, "-o", "name")


_ALL = "rmj,deployments,services,networkpolicies,pods"


def _where() -> str:
    cores, client = os.cpu_count(), kubectl("version", "-o", "json")
    server = json.loads(client)["serverVersion"]["gitVersion"]
    all_of_it = "its control plane, this benchmark and the controller"
    return f"{date.today()}. Kubernetes {server}, {all_of_it} on {cores} shared cores."


@dataclass
class Tally:
    """Counts requests."""

    total: int = 0

    def __call__(self, verb: str, resource: str, code: int) -> None:
        self.total += 1


async def _settled(figures: Any, window_s: float = SETTLED_S, timeout_s: float = 120.0) -> dict[str, float] | None:
    """The figures once nothing was written for a while; None if the pods' owners and the scheduler go on for longer."""
    deadline = time.monotonic() + timeout_s
    before: dict[str, float] = figures()
    while time.monotonic() < deadline:
        await asyncio.sleep(window_s)
        now: dict[str, float] = figures()
        if writes(now) == writes(before):
            return now
        before = now
    return None


async def _births(create: Create, jobs: Sequence[Object]) -> list[float]:
    born = [0.0] * len(jobs)

    async def one(index: int) -> None:
        born[index] = time.monotonic()
        await create(jobs[index])

    await each(range(len(jobs)), one)
    return born


async def _create_all(api: Api, children: Sequence[Object]) -> None:
    for child in children:
        await api.create(child)


async def _create_with_status(api: Api, of_job: Object, children: Sequence[Object]) -> None:
    created = await api.create(of_job) or {}
    await asyncio.gather(*(api.create(child) for child in children))
    now = datetime.now(UTC)
    message = "a message as long as those of a controller are"
    false_conditions = [Condition(kind, "False", "Test", message) for kind in _CONDITIONS]
    job_conditions = conditions.merged([], false_conditions, generation=1, now=now)
    await api.apply_status(created, {"phase": "Pending", "observedGeneration": 1, "conditions": job_conditions})
    await api.emit(created, Event("Normal", "Test", message), at=conditions.timestamp(now))


_CONDITIONS = ("Accepted", "Placed", "ChildrenApplied", "RolloutReady", "LearnerRunning", "WeightsInSync", "Training")


async def each(items: Sequence[Any], work: Any) -> list[float]:
    """Calls `work` for each item, some at a time; the seconds that each took."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(item: Any) -> float:
        async with gate:
            started = time.monotonic()
            await work(item)
            return time.monotonic() - started

    return list(await asyncio.gather(*map(one, items)))


@contextlib.contextmanager
def controller(*names: str) -> Iterator[Any]:
    """A controller for these namespaces, or for all; gives a function that reads its figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [*(f"--namespace={name}" for name in names), f"--listen=127.0.0.1:{port}", "--log-level=warning"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([sys.executable, "-m", "stage2_controller", *options], stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _answers(f"{url}/readyz"))
            yield lambda: read(urlopen(f"{url}/metrics").read().decode()) | {"peak_mb": _peak_mb(process.pid)}
        finally:
            process.terminate()
            process.wait()


def read(text: str) -> dict[str, float]:
    """Prometheus' text as numbers by name and labels."""
    return {key: float(value) for key, value in re.findall(r"^([^#\s]+) (\S+)$", text, re.MULTILINE)}


def _peak_mb(process: int) -> float:
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def requests(figures: dict[str, float]) -> float:
    """All requests to the API server, besides watches."""
    return sum(value for key, value in figures.items() if key.startswith("stage2_api_requests_total"))


def memory(figures: dict[str, float]) -> float:
    """Resident memory in MB."""
    return figures["process_resident_memory_bytes"] / 2**20


def writes(figures: dict[str, float]) -> float:
    """Those that write."""
    found = (
        value
        for key, value in figures.items()
        if re.search(r'requests_total.*verb="(create|patch|update|delete)"', key)
    )
    return sum(found)


def _answers(url: str) -> bool:
    try:
        return int(urlopen(url).status) == 200
    except OSError:
        return False


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
