"""Rounds without others: under an exact quota, with a node that comes for the placeholder, with claimed devices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator

from bench.cluster import kubectl
from bench.placement.lane import GPU, GPUS, REACHED_WITHIN_S, ROLES, Cluster, refused
from bench.placement.rounds import HALF, NONE, WHOLE, Outcome, clear
from bench.placement.swaps import Job, Way

SWAPPED_WITHIN_S = 30.0


def set_quota(namespace: str) -> None:
    """Allow a namespace the GPUs of one job and no more."""
    spec = {"hard": {f"requests.{GPU}": str(GPUS)}}
    metadata = {"name": "exact", "namespace": namespace}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec}
    kubectl("apply", "-f", "-", stdin=body)


async def counted(cluster: Cluster, used: int) -> None:
    """Wait until the quota counts that many GPUs as used."""
    for _ in range(int(REACHED_WITHIN_S / 0.2)):
        quota = await cluster.get("ResourceQuota", cluster.namespace, "exact") or {}
        if (quota.get("status") or {}).get("used", {}).get(f"requests.{GPU}") == str(used):
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"the quota of {cluster.namespace} never counted {used} GPUs")


async def under_quota(cluster: Cluster, lane: str, name: str, *, way: Way) -> Outcome:
    """Swap where the quota allows the job and no more: the placeholder takes all of it."""
    await counted(cluster, 0)
    return await _swap(Job(cluster, lane, name, way), counted(cluster, GPUS))


async def with_claims(cluster: Cluster, lane: str, name: str, *, way: Way) -> Outcome:
    """Swap where placeholder and pods claim their devices."""
    return await _swap(Job(cluster, lane, name, way, claims=True), asyncio.sleep(0))


async def _swap(job: Job, ready: Awaitable[None]) -> Outcome:
    await job.place()
    try:
        await job.cluster.reach(lambda: job.node() is not None, f"the placeholder of {job.name} is bound")
        await ready
        started = time.monotonic()
        swap = asyncio.create_task(job.way.swap(job, str(job.node())))
        whole = await job.cluster.until(job.whole, SWAPPED_WITHIN_S)
        seconds = time.monotonic() - started
        swap.cancel()
        await asyncio.gather(swap, return_exceptions=True)
        return Outcome(WHOLE, seconds) if whole else Outcome(HALF if job.bound() else NONE)
    finally:
        await clear(job)


async def on_new_node(cluster: Cluster, lane: str, name: str, *, way: Way) -> Outcome:
    """Add a node once the scheduler has refused the placeholder, beside a node where only the servers fit."""
    job = Job(cluster, lane, name, way)
    made = f"{lane}-{name}"
    try:
        await job.place()
        placeholder = job.placeholder
        await cluster.reach(lambda: any(map(refused, cluster.named(placeholder))), f"{placeholder} waits")
        await cluster.add_node(made, lane)
        await cluster.reach(lambda: job.node() is not None, f"the placeholder of {name} is bound")
        started = time.monotonic()
        await way.swap(job, str(job.node()))
        whole = await cluster.until(job.whole, SWAPPED_WITHIN_S)
        there = {str(pod["spec"].get("nodeName")) for pod in job.pods().values()} == {made}
        kind = WHOLE if whole and there else HALF if job.bound() else NONE
        return Outcome(kind, time.monotonic() - started)
    finally:
        await clear(job)
        await cluster.remove_node(made)


_CLAIMS = "resource.k8s.io/v1"


@contextlib.contextmanager
def devices(namespace: str, node: str) -> Iterator[None]:
    """Publish eight devices of a node, as a driver would, and the templates of the claims for them."""
    selector = {"cel": {"expression": f'device.driver == "{namespace}.example"'}}
    driver, listed = f"{namespace}.example", [{"name": f"gpu-{index}"} for index in range(GPUS)]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    for kind, spec in (
        ("DeviceClass", {"selectors": [selector]}),
        ("ResourceSlice", {"driver": driver, "nodeName": node, "pool": pool, "devices": listed}),
    ):
        _apply(kind, namespace, spec)
    for gpus in {GPUS, *ROLES.values()}:
        exactly = {"deviceClassName": namespace, "count": gpus}
        claim = {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}}
        _apply("ResourceClaimTemplate", f"gpus-{gpus}", claim, namespace=namespace)
    try:
        yield
    finally:
        kubectl("delete", "deviceclass,resourceslice", namespace)


def _apply(kind: str, name: str, spec: object, **metadata: str) -> None:
    body = {"apiVersion": _CLAIMS, "kind": kind, "metadata": {"name": name, **metadata}, "spec": spec}
    kubectl("apply", "-f", "-", stdin=body)
