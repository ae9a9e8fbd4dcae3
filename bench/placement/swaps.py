"""The ways in which a Deployment's pod and a Job's pod can take the place of the placeholder that the scheduler bound.

Each is what a controller would do from the moment when it learns the placeholder's node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from bench.placement.lane import GPUS, HELD, ROLES, Cluster, Object, Pod, node_of, refused

WEAKER, STRONGER = (f"stage2-bench-{word}-{os.getpid()}" for word in ("weaker", "stronger"))
CLASSES = {WEAKER: -5, STRONGER: 1}
"""PriorityClasses: the cluster autoscaler adds no node for pods below -10."""
KINDS = {"Job": "learner", "Deployment": "servers"}
MADE_WITHIN_S = 15.0


@dataclass(frozen=True)
class Job:
    """One job of a lane: its placeholder, its Deployment and its Job, by the names that all of them start with."""

    cluster: Cluster
    lane: str
    name: str
    way: Way
    claims: bool = False

    @property
    def placeholder(self) -> str:
        """The placeholder's name."""
        return f"placeholder-{self.name}"

    async def place(self) -> None:
        """Create the placeholder, and the pods too where they wait behind a gate."""
        labels = {HELD: str(self.way.ends_after_s)}
        spec = Pod(self.lane, GPUS, self.way.placeholder_class, claims=self.claims).spec()
        await self.cluster.make("Pod", self.placeholder, _slow(spec) if self.way.ends_after_s else spec, labels)
        if self.way.gated:
            await self.create_pods(None)
            await self.cluster.until(lambda: len(self.pods()) == len(ROLES), MADE_WITHIN_S)

    def node(self) -> str | None:
        """Return the node of the placeholder."""
        return next((node_of(pod) for pod in self.cluster.named(self.placeholder)), None)

    async def create_pods(self, node: str | None) -> None:
        """Create Deployment and Job, tied to the node."""
        labels = {"job": self.name}
        for kind, role in KINDS.items():
            spec = Pod(self.lane, ROLES[role], self.way.pods_class, node, self.way.gated, self.claims).spec()
            if kind == "Job":
                template = {"metadata": {"labels": labels}, "spec": {**spec, "restartPolicy": "Never"}}
                await self.cluster.make(kind, f"{self.name}-{role}", {"template": template})
            else:
                template = {"metadata": {"labels": labels}, "spec": spec}
                body = {"selector": {"matchLabels": labels}, "template": template}
                await self.cluster.make(kind, f"{self.name}-{role}", body)

    def pods(self) -> dict[str, Object]:
        """Return the pods of Deployment and Job, by role."""
        return dict(self._pods())

    def _pods(self) -> Iterator[tuple[str, Object]]:
        for role in ROLES:
            yield from ((role, pod) for pod in self.cluster.named(f"{self.name}-{role}-"))

    def bound(self) -> set[str]:
        """Return the roles whose pod is bound."""
        return {role for role, pod in self.pods().items() if node_of(pod)}

    def whole(self) -> bool:
        """Return whether both are."""
        return self.bound() == set(ROLES)

    async def pods_refused(self) -> None:
        """Wait until the scheduler has refused both pods."""
        await self.cluster.until(
            lambda: len(self.pods()) == len(ROLES) and all(map(refused, self.pods().values())), MADE_WITHIN_S
        )

    async def end_placeholder(self) -> None:
        """Delete the placeholder."""
        await self.cluster.remove("Pod", self.placeholder)

    async def clear(self) -> None:
        """Delete all that the job has."""
        for kind, role in KINDS.items():
            await self.cluster.remove(kind, f"{self.name}-{role}")
        await self.end_placeholder()


def _slow(spec: Object) -> Object:
    return {**spec, "terminationGracePeriodSeconds": 30}


async def delete_first(job: Job, node: str) -> None:
    """Delete the placeholder, then create the pods."""
    await job.end_placeholder()
    await job.create_pods(node)


async def create_first(job: Job, node: str) -> None:
    """Create the pods, and delete the placeholder once the scheduler has refused both."""
    await job.create_pods(node)
    await job.pods_refused()
    await job.end_placeholder()


async def open_gates(job: Job, node: str) -> None:
    """Delete the placeholder and open the gates of the pods that exist already."""
    opened = (job.cluster.open_gate(pod["metadata"]["name"], node) for pod in job.pods().values())
    await asyncio.gather(job.end_placeholder(), *opened)


async def outrank(job: Job, node: str) -> None:
    """Create pods that outrank the placeholder: the scheduler evicts it for them."""
    await job.create_pods(node)


async def nominate(job: Job, node: str) -> None:
    """Create the pods, nominate the node for both in place of the scheduler, then delete the placeholder."""
    await job.create_pods(node)
    await job.pods_refused()
    await asyncio.gather(*(job.cluster.nominate(pod["metadata"]["name"], node) for pod in job.pods().values()))
    await job.end_placeholder()


@dataclass(frozen=True)
class Way:
    """A way, and the priorities that it needs."""

    swap: Callable[[Job, str], Coroutine[Any, Any, None]]
    placeholder_class: str | None = None
    pods_class: str | None = None
    gated: bool = False
    ends_after_s: float = 0.0  # how long the placeholder takes to end


WAYS = {
    "delete, then create": Way(delete_first),
    "create, then delete": Way(create_first),
    "gates": Way(open_gates, gated=True),
    "weaker placeholder": Way(outrank, placeholder_class=WEAKER),
    "stronger pods": Way(outrank, pods_class=STRONGER),
    "stronger pods, ends in 2 s": Way(outrank, pods_class=STRONGER, ends_after_s=2.0),
    "nominated by hand": Way(nominate),
}
