"""A lane: a node without a kubelet, and the pods that compete for it. Rounds on different lanes do not meet."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio import client, config

from stage2_controller.cluster.api_server import Api, ApiRefused, PlainClient
from stage2_controller.job import kinds
from stage2_controller.state import conditions

LABEL = "stage2.dev/bench-lane"
HELD = "stage2.dev/bench-ends-after"
"""A label of pods that take so many seconds to end; all others end at once."""
GPU = "nvidia.com/gpu"
GPUS, SERVER_GPUS, LEARNER_GPUS, FOREIGN_GPUS = 8, 7, 1, 1
ROLES: Mapping[str, int] = {"servers": SERVER_GPUS, "learner": LEARNER_GPUS}
GATE = "stage2.dev/place"
REACHED_WITHIN_S = 60.0
_BEAT_S = 8.0
_MERGE = "application/merge-patch+json"
_NODE = {"apiVersion": "v1", "kind": "Node"}
_READY = {"type": "Ready", "status": "True", "reason": "Bench", "message": "no kubelet"}
_AT_ONCE = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
Object = Mapping[str, Any]


class Cluster(Api):
    """The requests of the benchmark, and all pods of its namespace as the API server last told."""

    def __init__(self, api_client: client.ApiClient, namespace: str) -> None:
        super().__init__(api_client, lambda verb, resource, code: None)
        self.namespace = namespace
        self.pods: dict[str, Object] = {}
        self._changed = asyncio.Condition()
        self._nodes: dict[str, int] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}

    async def make(self, kind: str, name: str, spec: Object, labels: Mapping[str, str] | None = None) -> None:
        """Create an object of the benchmark's namespace."""
        metadata = {"name": name, "namespace": self.namespace, "labels": labels or {}}
        await self.create(
            {"apiVersion": kinds.RESOURCES[kind].api_version, "kind": kind, "metadata": metadata, "spec": spec}
        )

    async def remove(self, kind: str, name: str) -> None:
        """Delete an object of it, and in the background what that owns."""
        await self.delete(kind, self.namespace, name)

    async def open_gate(self, name: str, node: str) -> None:
        """Tie a gated pod to a node and let the scheduler look at it."""
        spec = {"schedulingGates": None, "affinity": tied_to(node)}
        await self._request("patch", "Pod", self.namespace, name, body={"spec": spec}, content_type=_MERGE)

    async def nominate(self, name: str, node: str) -> None:
        """Write into a pod's status that the scheduler is to keep the node's room for it."""
        await self.patch_status("Pod", self.namespace, name, {"status": {"nominatedNodeName": node}})

    async def until(self, what: Callable[[], object], within_s: float) -> bool:
        """Wait until the pods are so; return whether they are in time."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(what)
        except TimeoutError:
            return False
        return True

    def named(self, *starts: str) -> list[Object]:
        """Return the pods whose names start so, and that were not told to end."""
        return [pod for name, pod in self.pods.items() if name.startswith(starts) and not _told_to_end(pod)]

    async def reach(self, what: Callable[[], object], why: str) -> None:
        """Wait until the pods are so, which they must be soon. Raise TimeoutError."""
        if not await self.until(what, REACHED_WITHIN_S):
            raise TimeoutError(f"not within {REACHED_WITHIN_S:.0f} s: {why}")

    async def follow(self, since: str) -> None:
        """Watch the pods for as long as this runs, and end those that are told to, as a kubelet would."""
        where: Any = {"namespace": self.namespace, "labels": None, "fields": None}
        async for event in self.watch("Pod", since, ends_after_s=7200, **where):
            pod = event["object"]
            name = pod["metadata"]["name"]
            async with self._changed:
                if event["type"] == "DELETED":
                    self.pods.pop(name, None)
                else:
                    self.pods[name] = pod
                self._changed.notify_all()
            if event["type"] != "DELETED" and _told_to_end(pod) and name not in self._ending:
                self._ending[name] = asyncio.create_task(self._end(name, pod))

    async def add_node(self, name: str, lane: str, gpus: int = GPUS) -> None:
        """Create a ready node of a lane, which lives until `close`."""
        metadata = {"name": name, "labels": {LABEL: lane, "kubernetes.io/hostname": name}}
        spec = {"taints": [{"key": LABEL, "effect": "NoSchedule"}]}
        await self._request("create", "Node", None, body={**_NODE, "metadata": metadata, "spec": spec})
        self._nodes[name] = gpus
        await self._beat(name)

    async def remove_node(self, name: str) -> None:
        """Delete a node."""
        self._nodes.pop(name)
        await self._request("delete", "Node", None, name, body=_AT_ONCE)

    async def live(self) -> None:
        """Say of each node that it lives, for as long as this runs."""
        while True:
            await asyncio.sleep(_BEAT_S)
            await asyncio.gather(*map(self._beat, [*self._nodes]))

    async def end(self) -> None:
        """Delete all nodes and end all connections."""
        await asyncio.gather(*self._ending.values(), *map(self.remove_node, [*self._nodes]))
        await self.close()

    async def _beat(self, node: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": now}
        metadata = {"name": node, "namespace": "kube-node-lease"}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        await self.apply({**kind, "metadata": metadata, "spec": lease})
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "500", GPU: str(self._nodes[node])}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [_READY]}
        await self.patch_status("Node", "", node, {"status": status})

    async def _end(self, name: str, pod: Object) -> None:
        await asyncio.sleep(float((pod["metadata"].get("labels") or {}).get(HELD, 0)))
        with contextlib.suppress(ApiRefused):  # it is gone already
            await self._request("delete", "Pod", self.namespace, name, body=_AT_ONCE)
        self._ending.pop(name, None)


@contextlib.asynccontextmanager
async def cluster(namespace: str, lanes: Mapping[str, int]) -> AsyncIterator[Cluster]:
    """The cluster of KUBECONFIG, with a node of so many GPUs for each lane, and the pods of the namespace watched."""
    configuration = client.Configuration(client_session_kwargs={"trust_env": False})
    await config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    configuration.connection_pool_maxsize = 0  # no bound
    made = Cluster(PlainClient(configuration), namespace)
    page = await anext(made.pages("Pod", namespace, labels=None, fields=None))  # of none yet
    tasks = [asyncio.create_task(work) for work in (made.follow(page["metadata"]["resourceVersion"]), made.live())]
    try:
        for lane, gpus in lanes.items():
            await made.add_node(lane, lane, gpus)
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await made.end()


@dataclass(frozen=True)
class Pod:
    """What a pod of the benchmark asks for."""

    lane: str
    gpus: int
    priority_class: str | None = None
    node: str | None = None  # that it is tied to
    gated: bool = False
    claims: bool = False  # its GPUs, of resource.k8s.io, in place of counting them

    def spec(self) -> dict[str, Any]:
        """Return the pod's spec: any node of its lane, or one node by its name."""
        amounts = {"cpu": str(2 * self.gpus), "memory": f"{8 * self.gpus}Gi"}
        resources: dict[str, Any] = {"claims": [{"name": "gpus"}]}
        if not self.claims:
            resources, amounts = {}, {GPU: str(self.gpus), **amounts}
        spec: dict[str, Any] = {
            "nodeSelector": {LABEL: self.lane},
            "tolerations": [{"key": LABEL, "operator": "Exists"}],
            "containers": [{"name": "pause", "image": "pause", "resources": {**resources, "limits": amounts}}],
            "automountServiceAccountToken": False,
        }
        if self.priority_class:
            spec["priorityClassName"] = self.priority_class
        if self.claims:
            spec["resourceClaims"] = [{"name": "gpus", "resourceClaimTemplateName": f"gpus-{self.gpus}"}]
        if self.node:
            spec["affinity"] = tied_to(self.node)
        if self.gated:
            spec["schedulingGates"] = [{"name": GATE}]
        return spec


def tied_to(node: str) -> dict[str, Any]:
    """Return the affinity to one node, as the controller writes it."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def node_of(pod: Object) -> str | None:
    """Return the node to which a pod is bound."""
    node: str | None = pod["spec"].get("nodeName")
    return node


def refused(pod: Object) -> bool:
    """Return whether the scheduler has found no node for the pod."""
    scheduled = conditions.find(pod.get("status", {}), "PodScheduled") or {}
    return scheduled.get("reason") == "Unschedulable"


def _told_to_end(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]
