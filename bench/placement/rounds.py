"""One round of a lane: a placeholder is bound, others want its room, the job swaps; what comes of it, how quickly."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from bench.placement.lane import FOREIGN_GPUS, GPUS, Cluster, Object, Pod, node_of, refused
from bench.placement.swaps import Job, Way

SETTLES_WITHIN_S = 10.0
RESTED_S = 1.5
"""Until others that were refused once may be tried again: those of a busy cluster wait for longer."""
ARRIVES_WITHIN_S = 0.5
WHOLE, HALF, NONE, LOST = "whole", "half", "none", "lost"


@dataclass(frozen=True)
class Outcome:
    """What came of a round. seconds: from the swap's start until both pods were bound."""

    kind: str
    seconds: float | None = None


Others = Callable[[Job], Awaitable["asyncio.Task[None] | None"]]


async def nobody(job: Job) -> None:
    """Let nobody else want the room."""


async def waiting(job: Job) -> None:
    """Let a pod of another Deployment wait for room, as long as it takes until the scheduler would try it again."""
    await _foreign(job, FOREIGN_GPUS, None)


async def rival(job: Job) -> None:
    """Let the placeholder of another job wait for the whole node."""
    await _foreign(job, GPUS, job.way.placeholder_class)


async def arriving(job: Job) -> asyncio.Task[None]:
    """Let such a pod arrive at some moment of the half second that begins with the swap."""

    async def later() -> None:
        await asyncio.sleep(random.uniform(0, ARRIVES_WITHIN_S))
        await job.cluster.make("Pod", foreign_name(job), Pod(job.lane, FOREIGN_GPUS).spec())

    return asyncio.create_task(later())


OTHERS: Mapping[str, Others] = {"nobody": nobody, "waiting": waiting, "arriving": arriving, "rival": rival}


async def _foreign(job: Job, gpus: int, priority_class: str | None) -> None:
    await job.cluster.make("Pod", foreign_name(job), Pod(job.lane, gpus, priority_class).spec())
    looked_at = "the scheduler has looked at the pod of others"
    await job.cluster.reach(lambda: any(refused(pod) or node_of(pod) for pod in _others(job)), looked_at)
    await asyncio.sleep(RESTED_S)


def foreign_name(job: Job) -> str:
    """Return the name of the pod of others in a round."""
    return f"foreign-{job.name}"


def _others(job: Job) -> list[Object]:
    return job.cluster.named(foreign_name(job))


async def play(cluster: Cluster, lane: str, name: str, *, way: Way, others: Others) -> Outcome:
    """Play one round, and clear the lane."""
    job = Job(cluster, lane, name, way)
    arrives = None
    try:
        await job.place()
        await cluster.reach(lambda: job.node() is not None, f"the placeholder of {name} is bound")
        node = job.node()
        arrives = await others(job)
        if job.node() is None:
            return Outcome(LOST)
        started = time.monotonic()
        await way.swap(job, str(node))
        await cluster.until(lambda: job.whole() or _slipped(job), SETTLES_WITHIN_S)
        return await _outcome(job, started)
    finally:
        if arrives:
            arrives.cancel()
            await asyncio.gather(arrives, return_exceptions=True)
        await clear(job)


async def _outcome(job: Job, started: float) -> Outcome:
    if job.whole():
        return Outcome(WHOLE, time.monotonic() - started)
    await job.cluster.until(lambda: bool(job.bound()), 1.0)
    return Outcome(HALF if job.bound() else NONE)


def _slipped(job: Job) -> bool:
    return any(node_of(pod) for pod in _others(job))


async def clear(job: Job) -> None:
    """Delete all that a round has made, and wait until it is gone."""
    await job.clear()
    await job.cluster.remove("Pod", foreign_name(job))

    pods = job.cluster.pods
    await job.cluster.reach(lambda: not any(job.name in name for name in pods), f"the pods of {job.name} are gone")
