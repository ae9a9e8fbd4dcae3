"""The same scenes with the controller itself, which has no placeholder: its account of all nodes and pods decides."""

from __future__ import annotations

import asyncio
import random
import time

from bench import cluster as scene
from bench.placement.lane import (
    FOREIGN_GPUS,
    GPUS,
    LABEL,
    LEARNER_GPUS,
    SERVER_GPUS,
    Cluster,
    Object,
    Pod,
    node_of,
    refused,
)
from bench.placement.rounds import (
    ARRIVES_WITHIN_S,
    HALF,
    NONE,
    RESTED_S,
    SETTLES_WITHIN_S,
    WHOLE,
    Outcome,
)

RIVALS = 2
REACTS_WITHIN_S = 4.0
"""How long the controller may take to create pods for room that others have taken already."""
ROLES = ("rollout", "learner")


def rmj(cluster: Cluster, lane: str, name: str) -> Object:
    """Return a job of seven servers and one learner for the nodes of a lane."""
    body = scene.job(0, cluster.namespace)
    placement = {"nodeSelector": {LABEL: lane}, "tolerations": [{"key": LABEL, "operator": "Exists"}]}
    spec = {
        **body["spec"],
        "rollout": {"servers": SERVER_GPUS},
        "learner": {"gpus": LEARNER_GPUS},
        "placement": placement,
    }
    return {**body, "metadata": {"name": name, "namespace": cluster.namespace}, "spec": spec}


def bound(cluster: Cluster, name: str) -> int:
    """Return how many of a job's pods are bound."""
    return sum(1 for role in ROLES for pod in cluster.named(f"{name}-{role}") if node_of(pod))


def _waits(cluster: Cluster, name: str) -> bool:
    """Return whether the scheduler has refused both pods of a job."""
    return len([*filter(refused, cluster.named(name))]) == len(ROLES)


async def play(cluster: Cluster, lane: str, name: str, *, others: str) -> Outcome:
    """Play one round: jobs and pods of others wait for the node that an earlier pod has, and it ends."""
    earlier, foreign = f"earlier-{name}", f"foreign-{name}"
    jobs = [f"{name}-{index}" for index in range(RIVALS if others == "rival" else 1)]
    tasks: list[asyncio.Task[None]] = []
    try:
        await cluster.make("Pod", earlier, Pod(lane, GPUS).spec())
        await cluster.reach(lambda: any(map(node_of, cluster.named(earlier))), f"{earlier} is bound")
        for job in jobs:
            await cluster.create(rmj(cluster, lane, job))
        await cluster.reach(lambda: all(_waits(cluster, job) for job in jobs), f"the pods of {name} wait")
        if others == "waiting":
            await cluster.make("Pod", foreign, Pod(lane, FOREIGN_GPUS).spec())
            await cluster.reach(lambda: any(map(refused, cluster.named(foreign))), f"{foreign} waits")
        await asyncio.sleep(RESTED_S)
        started = time.monotonic()
        await cluster.remove("Pod", earlier)
        if others == "arriving":
            tasks.append(asyncio.create_task(_arrive(cluster, lane, foreign)))
        return await _outcome(cluster, jobs, foreign, started)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _clear(cluster, name, jobs)


async def _arrive(cluster: Cluster, lane: str, name: str) -> None:
    await asyncio.sleep(random.uniform(0, ARRIVES_WITHIN_S))
    await cluster.make("Pod", name, Pod(lane, FOREIGN_GPUS).spec())


async def _outcome(cluster: Cluster, jobs: list[str], foreign: str, started: float) -> Outcome:
    def settled() -> bool:
        whole = any(bound(cluster, job) == len(ROLES) for job in jobs)
        return whole or any(map(node_of, cluster.named(foreign)))

    await cluster.until(settled, SETTLES_WITHIN_S)
    if any(bound(cluster, job) == len(ROLES) for job in jobs):
        return Outcome(WHOLE, time.monotonic() - started)
    half = await cluster.until(lambda: any(bound(cluster, job) for job in jobs), REACTS_WITHIN_S)
    return Outcome(HALF if half else NONE)


async def _clear(cluster: Cluster, name: str, jobs: list[str]) -> None:
    for job in jobs:
        await cluster.remove("RolloutMatchingJob", job)
    for pod in (f"earlier-{name}", f"foreign-{name}"):
        await cluster.remove("Pod", pod)
    await cluster.reach(lambda: not any(name in pod for pod in cluster.pods), f"the pods of {name} are gone")
