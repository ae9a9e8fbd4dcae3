"""A placeholder pod on the real scheduler: `python -m bench.placement --write`, on the cluster of KUBECONFIG."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import partial
from pathlib import Path

from bench.cluster import kubectl, namespace
from bench.operator import controller
from bench.placement import limits, rounds, today
from bench.placement.lane import GPUS, SERVER_GPUS, Cluster, cluster
from bench.placement.rounds import HALF, LOST, NONE, OTHERS, WHOLE, Outcome
from bench.placement.swaps import CLASSES, WAYS

from tests.support.tools import chosen_cluster

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "placement.md"
LANES = 8
TODAY = "the controller, without a placeholder"
QUOTA, NEW_NODE, CLAIMS = "exact quota", "new node", "claimed devices"
ALONE = {QUOTA: limits.under_quota, NEW_NODE: limits.on_new_node, CLAIMS: limits.with_claims}
"""Scenes of one lane: a quota is a namespace's."""
SCENES = (*OTHERS, *ALONE)
Play = Callable[[Cluster, str, str], Awaitable[Outcome]]
HEAD = (
    "| way | others | rounds | whole | half | none | placeholder lost | seconds |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds and print their table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, TODAY), default=[*WAYS, TODAY], metavar="WAY")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=[*SCENES], metavar="SCENE")
    parser.add_argument("--lanes", type=int, default=LANES, help="rounds at a time, each on a node of its own")
    parser.add_argument("--write", action="store_true", help="keep the rows in bench/results/placement.md")
    options = parser.parse_args(arguments)
    with chosen_cluster():
        sys.stdout.write(f"{HEAD}\n")
        for way in options.ways:
            for scene in options.scenes:
                if way == TODAY and scene in ALONE:
                    continue
                outcomes = measured(way, scene, options.rounds, 1 if scene in ALONE else options.lanes)
                line = row(way, scene, outcomes)
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
                if options.write:
                    before = RESULTS.read_text("utf-8") if RESULTS.exists() else ""
                    RESULTS.write_text(merged(before, line), encoding="utf-8")
    return 0


def measured(way: str, scene: str, count: int, lanes: int) -> list[Outcome]:
    """Play so many rounds of one way and scene."""
    with ExitStack() as live:
        space = live.enter_context(namespace())
        gpus = SERVER_GPUS if scene == NEW_NODE else GPUS
        names = {f"{space}-{index}": gpus for index in range(lanes)}
        live.enter_context(classes())
        if scene == QUOTA:
            limits.set_quota(space)
        if scene == CLAIMS:
            live.enter_context(limits.devices(space, *names))
        if way == TODAY:
            live.enter_context(controller(space))
        return asyncio.run(played(space, names, count, played_by(way, scene)))


def played_by(way: str, scene: str) -> Play:
    """Return what plays one round."""
    if way == TODAY:
        return partial(today.play, others=scene)
    if scene in ALONE:
        return partial(ALONE[scene], way=WAYS[way])
    return partial(rounds.play, way=WAYS[way], others=OTHERS[scene])


async def played(space: str, lanes: Mapping[str, int], count: int, play: Play) -> list[Outcome]:
    """Share the rounds among the lanes."""
    left = iter(range(count))

    async def on(lane: str, live: Cluster) -> list[Outcome]:
        return [await play(live, lane, f"round-{number:04}") for number in left]

    async with cluster(space, lanes) as live:
        return [one for some in await asyncio.gather(*(on(lane, live) for lane in lanes)) for one in some]


@contextmanager
def classes() -> Iterator[None]:
    """The PriorityClasses of the ways that need some."""
    for name, value in CLASSES.items():
        body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        kubectl("apply", "-f", "-", stdin={**body, "value": value})
    try:
        yield
    finally:
        kubectl("delete", "priorityclass", *CLASSES)


def row(way: str, scene: str, outcomes: Sequence[Outcome]) -> str:
    """Return the table's line of one way and scene."""
    counts = Counter(one.kind for one in outcomes)
    seconds = sorted(one.seconds for one in outcomes if one.seconds is not None)
    shown = f"{statistics.median(seconds):.2f} ({seconds[-1]:.2f})" if seconds else "–"
    amounts = " | ".join(str(counts[kind]) for kind in (WHOLE, HALF, NONE, LOST))
    return f"| {way} | {scene} | {len(outcomes)} | {amounts} | {shown} |"


def merged(before: str, line: str) -> str:
    """Return the file of results: the row takes the place of the one of the same way and scene."""
    rows = {key_of(known): known for known in (*before.splitlines(), line) if key_of(known) in ORDER}
    table = "\n".join([HEAD, *(rows[key] for key in ORDER if key in rows)])
    return "\n\n".join(["# A placeholder pod for a whole job", ABOUT, table, where()]) + "\n"


def key_of(line: str) -> tuple[str, ...]:
    """Return the way and the scene of a table's line; of other lines, something else."""
    return tuple(part.strip() for part in line.split("|")[1:3])


ORDER = [(way, scene) for way in (*WAYS, TODAY) for scene in SCENES]
ABOUT = """\
`python -m bench.placement --lanes 16 --write`, with as many `--rounds` as the table says. A job needs 7 + 1
GPUs of a node with 8. A placeholder with the sum of both pods' GPUs, CPU and memory is bound; then Deployment and Job
are created for its node, and take its place in one of these ways:

- delete, then create: the placeholder is deleted, then both are created.
- create, then delete: both are created, and the placeholder is deleted once the scheduler has refused their pods.
- gates: both pods exist from the beginning behind scheduling gates; the placeholder is deleted as the gates are opened.
- weaker placeholder: it has priority -5, the pods have none (0), so the scheduler evicts it for them.
- stronger pods: the placeholder has no priority, the pods have 1. "Ends in 2 s": the placeholder takes as long to end.
- nominated by hand: as "create, then delete", and `status.nominatedNodeName` of both pods is written before.

Others, without a priority: "waiting": a pod of 1 GPU that the scheduler has refused, so that it waits for any room;
"arriving": the same pod, created at a random moment of the half second that begins with the swap; "rival": another
job's placeholder, which waits. "Exact quota": a ResourceQuota of 8 GPUs in the namespace, nobody else; "new node": a
node of 7 GPUs, and one of 8 that comes when the scheduler has refused the placeholder; "claimed devices": GPUs by
ResourceClaims, nobody else.

The controller without a placeholder is today's, with its defaults: a pod holds the node until it ends, and then the
controller, which has waited with pending pods, and others compete for it; "rival": two jobs wait, and one is to start.

Whole: both pods are bound. Half: a pod of others has got in, or time is up, and one of both is bound and holds GPUs;
none: neither is. Placeholder lost: evicted before the swap. Seconds from the swap (or from when the node is free) until
both pods are bound: the median of the whole rounds, and the longest. Up to sixteen rounds at a time, each on a node of
its own without a kubelet. Other work kept the same cores busy (load 18), which makes gaps and seconds longer.
Combinations without a row are not measured."""


def where() -> str:
    """Return when and on what the figures were taken."""
    server = json.loads(kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
    machine = f"{os.cpu_count()} shared cores"
    return f"{date.today()}. Kubernetes {server}, its control plane and this benchmark on {machine}."


if __name__ == "__main__":
    sys.exit(main())
