"""What the nodes of the cluster have free: their allocatable amounts, minus all pods, minus what jobs were promised.

One process holds it, and promises are made without waiting for anything in between: no two jobs get the same room.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stage2_controller import names, placement
from stage2_controller.observe import Key, key_of, version_of
from stage2_controller.observed import Object
from stage2_controller.placement import Amounts, Need, Room

SHUNNED_S = 300.0
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class _Pod:
    """A pod that takes room on a node."""

    uid: str
    node: str
    requests: Amounts
    priority: int
    key: Key | None  # the job that it belongs to
    role: str | None
    version: int


@dataclass(frozen=True)
class _Promise:
    """Room on a node that is kept for a job."""

    node: str
    need: Need


class Capacity:
    """The account of all nodes. `freed` is called when something got free while a job waits for room."""

    def __init__(
        self, freed: Callable[[], None] = lambda: None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.freed = freed
        self._nodes: dict[str, Object] = {}
        self._pods: dict[str, dict[str, _Pod]] = defaultdict(dict)  # by node and uid
        self._where: dict[str, str] = {}  # the node of each uid
        self._promises: dict[Key, _Promise] = {}
        self._promised_on: dict[str, dict[Key, _Promise]] = defaultdict(dict)
        self._free: dict[str, dict[int, tuple[Amounts, Amounts]]] = defaultdict(dict)  # by node and priority
        self._waiting: dict[Key, Need] = {}
        self._shunned: dict[tuple[Key, str], float] = {}  # until when
        self._clock = clock

    def put(self, kind: str, body: Object) -> None:
        """Takes in the state of a Node or Pod."""
        if kind == "Node":
            self._put_node(body)
        elif kind == "Pod":
            self._put_pod(body)

    def remove(self, kind: str, body: Object) -> None:
        """Forgets a Node or Pod."""
        if kind == "Node":
            self._nodes.pop(body["metadata"]["name"], None)
            self._free.pop(body["metadata"]["name"], None)
        elif kind == "Pod":
            self._drop(body["metadata"]["uid"])

    def retain(self, kind: str, listed: Iterable[Object], list_version: int) -> None:
        """Makes the account what a list says: what it does not name was deleted unnoticed."""
        found = list(listed)
        for body in found:
            self.put(kind, body)
        present = {body["metadata"]["uid"] for body in found}
        if kind == "Node":
            gone = [name for name, node in self._nodes.items() if node["metadata"]["uid"] not in present]
            for name in gone:
                del self._nodes[name]
                self._free.pop(name, None)
        else:
            known = [pod for pods in self._pods.values() for pod in pods.values()]
            for pod in known:
                if pod.uid not in present and pod.version <= list_version:
                    self._drop(pod.uid)

    def rooms(self, key: Key, need: Need) -> list[Room]:
        """All nodes with what is free on them for this job: others' promises count, its own does not."""
        return [self._room(name, node, key, need.priority) for name, node in self._nodes.items()]

    def node(self, name: str) -> Object | None:
        """The Node object, slim."""
        return self._nodes.get(name)

    def promised(self, key: Key) -> str | None:
        """The node on which the job has room kept."""
        promise = self._promises.get(key)
        return promise.node if promise else None

    def promise(self, key: Key, need: Need, node: str) -> None:
        """Keeps room for the job until `release`."""
        self._waiting.pop(key, None)
        made, before = _Promise(node, need), self._promises.get(key)
        if made == before:
            return
        self._break(key)
        self._promises[key] = self._promised_on[node][key] = made
        self._free.pop(node, None)
        if before:
            self._tell()

    def release(self, key: Key) -> None:
        """Ends the job's promise, and its wait."""
        self._waiting.pop(key, None)
        for refused in [pair for pair in self._shunned if pair[0] == key]:
            del self._shunned[refused]
        if self._break(key):
            self._tell()

    def wait(self, key: Key, need: Need) -> None:
        """The job has no room yet: `serve` looks for some as soon as anything is freed."""
        if self._break(key):
            self._tell()
        self._waiting[key] = need

    def serve(self) -> list[Key]:
        """Promises room to waiting jobs, highest priority first, then in the order in which they came; who got some."""
        served = []
        for key, need in sorted(self._waiting.items(), key=lambda item: -item[1].priority):
            node = placement.choose(need, self.rooms(key, need))
            if node:
                self.promise(key, need, node)
                served.append(key)
        return served

    def shun(self, key: Key, node: str) -> None:
        """The scheduler refused the job on this node for a reason that is not seen here: for a while, not there."""
        self._shunned[key, node] = self._clock() + SHUNNED_S

    def promises(self) -> Mapping[Key, str]:
        """The node of every job that has room."""
        return {key: promise.node for key, promise in self._promises.items()}

    def waiting(self) -> int:
        """How many jobs have no room."""
        return len(self._waiting)

    def _break(self, key: Key) -> bool:
        promise = self._promises.pop(key, None)
        if promise is None:
            return False
        del self._promised_on[promise.node][key]
        self._free.pop(promise.node, None)
        return True

    def _tell(self) -> None:
        if self._waiting:
            self.freed()

    def _put_node(self, body: Object) -> None:
        slim = _slim(body)
        known = self._nodes.get(body["metadata"]["name"])
        self._nodes[body["metadata"]["name"]] = slim
        if known != slim:  # heartbeats change nothing here
            self._free.pop(body["metadata"]["name"], None)
            self._tell()

    def _put_pod(self, body: Object) -> None:
        metadata, spec = body["metadata"], body["spec"]
        uid, node = metadata["uid"], spec.get("nodeName")
        if not node or body.get("status", {}).get("phase") in _ENDED:
            self._drop(uid)
            return
        known = self._pods[node].get(uid)
        if known and known.version > version_of(body):
            return
        self._where[uid] = node
        self._free.pop(node, None)
        self._pods[node][uid] = _Pod(
            uid=uid,
            node=node,
            requests=placement.requests(spec),
            priority=spec.get("priority") or 0,
            key=key_of("Pod", body),
            role=metadata.get("labels", {}).get(names.LABEL_ROLE),
            version=version_of(body),
        )

    def _drop(self, uid: str) -> None:
        node = self._where.pop(uid, None)
        if node is None:
            return
        del self._pods[node][uid]
        self._free.pop(node, None)
        if not self._pods[node]:
            del self._pods[node]
        self._tell()

    def _room(self, name: str, node: Object, key: Key, priority: int) -> Room:
        free, by_preemption = self._free_on(name, node, key, priority)
        return Room(
            name=name,
            labels=node["metadata"]["labels"],
            taints=node["spec"]["taints"],
            ready=node["status"]["ready"],
            cordoned=node["spec"]["unschedulable"],
            free=free,
            free_by_preemption=by_preemption,
            shunned=self._shunned.get((key, name), 0) > self._clock(),
        )

    def _free_on(self, name: str, node: Object, key: Key, priority: int) -> tuple[Amounts, Amounts]:
        """Free amounts, as they are and by preemption; kept until something on the node changes."""
        own = key in self._promised_on.get(name, {})
        kept = None if own else self._free[name].get(priority)
        if kept is None:
            allocatable, taken = node["status"]["allocatable"], list(self._taken(name, key))
            stronger = (amounts for amounts, theirs in taken if theirs >= priority)
            kept = _minus(allocatable, (amounts for amounts, _ in taken)), _minus(allocatable, stronger)
            if not own:
                self._free[name][priority] = kept
        return kept

    def _taken(self, node: str, asking: Key) -> Iterator[tuple[Amounts, int]]:
        """What is not free on a node, each with its priority."""
        bound: set[tuple[Key | None, str | None]] = set()
        for pod in self._pods.get(node, {}).values():
            bound.add((pod.key, pod.role))
            yield pod.requests, pod.priority
        for key, promise in self._promised_on.get(node, {}).items():
            for need in promise.need.pods:
                if key != asking and (key, need.role) not in bound:
                    yield need.requests, promise.need.priority


def _minus(amounts: Amounts, taken: Iterable[Amounts]) -> dict[str, float]:
    used = placement.added(taken)
    return {key: amount - used.get(key, 0) for key, amount in amounts.items()}


def _slim(body: Object) -> dict[str, Any]:
    """The part of a node that placement looks at; nothing in it changes with a heartbeat."""
    status, spec = body.get("status", {}), body.get("spec", {})
    told = {item["type"]: item["status"] for item in status.get("conditions", [])}
    return {
        "metadata": {
            "name": body["metadata"]["name"],
            "uid": body["metadata"]["uid"],
            "labels": body["metadata"].get("labels", {}),
        },
        "spec": {"unschedulable": bool(spec.get("unschedulable")), "taints": spec.get("taints") or ()},
        "status": {
            "ready": told.get("Ready") == "True",
            "allocatable": placement.amounts(status.get("allocatable", {})),
        },
    }
