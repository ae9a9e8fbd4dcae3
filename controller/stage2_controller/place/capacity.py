"""The account of all nodes: what pods take, what is promised to jobs, and which jobs wait for room.

One process holds it. `Capacity.snapshot` freezes it for one job; `stage2_controller.place.placement.choose` decides on
that, and what it decides is recorded before anything else runs, so no two jobs are promised the same room.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stage2_controller.job.names import Key
from stage2_controller.job.objects import Amounts, add_amounts, parse_amounts, pod_requests
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import Need, NodeInfo
from stage2_controller.state.observed import Object, ended, role_of
from stage2_controller.state.store import key_of

PROMISE_S = 300.0
"""How long room is kept for pods that are not bound: a busy cluster creates and binds pods one by one."""
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0
_OF_EVERY_NODE = ("DaemonSet", "Node")  # owners of pods that a new node would have too; Node: of static pods


class Held(NamedTuple):
    """Room on a node that a pod takes, or that is promised to one."""

    amounts: Amounts
    priority: int
    of_every_node: bool = False


@dataclass(frozen=True)
class NodeState:
    """One node at one moment. `held`: bound pods by uid, promises by job and role."""

    node: Object
    held: Mapping[Hashable, Held]
    _infos: dict[int, NodeInfo] = field(default_factory=dict, compare=False, repr=False)  # by priority

    def seen_by(self, key: Key, need: Need, *, refused: bool = False) -> NodeInfo:
        """Return the node as one job sees it: promises to others take room, its own do not."""
        info = self._infos.get(need.priority) or self._infos.setdefault(need.priority, self._info(need.priority))
        own = [entry for pod in need.pods if (entry := self.held.get((key, pod.role)))]
        if not own and not refused:
            return info
        stronger = [entry.amounts for entry in own if entry.priority >= need.priority]
        return replace(
            info,
            free=_plus(info.free, [entry.amounts for entry in own]),
            free_by_preemption=_plus(info.free_by_preemption, stronger),
            refused=refused,
        )

    def _info(self, priority: int) -> NodeInfo:
        allocatable: Amounts = self.node["status"]["allocatable"]
        held = self.held.values()
        return NodeInfo(
            name=self.node["metadata"]["name"],
            labels=self.node["metadata"]["labels"],
            taints=self.node["spec"]["taints"],
            ready=self.node["status"]["ready"],
            cordoned=self.node["spec"]["unschedulable"],
            free=_minus(allocatable, (one.amounts for one in held)),
            free_by_preemption=_minus(allocatable, (one.amounts for one in held if one.priority >= priority)),
            allocatable=_minus(allocatable, (one.amounts for one in held if one.of_every_node)),
        )


@dataclass(frozen=True)
class Retries:
    """The failed attempts to place a job: when the next one may begin, and which nodes refused it."""

    failed: int
    paused_until: float
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Snapshot:
    """All nodes at one moment as one job sees them, and what is remembered of the job."""

    key: Key
    nodes: Mapping[str, NodeState]
    sees_nodes: bool = True  # False: the controller may not read nodes, and the scheduler chooses for every job
    promised: str | None = None  # the node on which the job has room kept
    refused: frozenset[str] = frozenset()  # the nodes that did not take the job in earlier attempts
    pause_s: float = 0.0  # until the next attempt may begin

    def nodes_for(self, need: Need) -> list[NodeInfo]:
        """Return all nodes with what is free on them for the job."""
        return [state.seen_by(self.key, need, refused=name in self.refused) for name, state in self.nodes.items()]

    def node_for(self, need: Need, name: str) -> NodeInfo | None:
        """Return one of them; None if there is no such node."""
        state = self.nodes.get(name)
        return state.seen_by(self.key, need) if state else None

    def refused_hosts(self) -> tuple[str, ...]:
        """Return the labels kubernetes.io/hostname of the nodes that refused the job."""
        states = (self.nodes.get(name) for name in self.refused)
        labels = (state.node["metadata"]["labels"].get(node_fit.HOSTNAME) for state in states if state)
        return tuple(sorted(filter(None, labels)))


@dataclass(frozen=True, slots=True)
class _Pod:
    """A bound pod. `key` and `role`: of the job that it belongs to, if it is one of ours."""

    held: Held
    key: Key | None
    role: str | None


@dataclass(frozen=True)
class _Promise:
    """Room that is kept for those pods of a job that are not bound yet."""

    node: str
    need: Need
    until: float


class Capacity:
    """What is used, promised and free on each node now. `freed` is called when room becomes free while a job waits."""

    def __init__(
        self,
        freed: Callable[[], object] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sees_nodes: bool = True,
    ) -> None:
        self._freed = freed
        self._sees_nodes = sees_nodes
        self._clock = clock
        self._nodes: dict[str, Object] = {}
        self._pods: dict[str, dict[str, _Pod]] = defaultdict(dict)  # by node and uid
        self._node_of: dict[str, str] = {}  # by uid of a pod
        self._states: dict[str, NodeState] = {}  # of the nodes that have not changed since
        self._promises: dict[Key, _Promise] = {}
        self._retries: dict[Key, Retries] = {}
        self._waiting: dict[Key, tuple[Need, str]] = {}  # with the start of the job, by which jobs have their turn
        self._freed_nodes: set[str] = set()  # since waiting jobs were last looked at

    def put(self, kind: str, body: Object) -> None:
        """Take in the state of a Node or Pod."""
        (self._put_node if kind == "Node" else self._put_pod)(body)

    def remove(self, kind: str, body: Object) -> None:
        """Forget a Node or Pod."""
        if kind == "Node":
            self._forget_node(body["metadata"]["name"])
        else:
            self._drop_pod(body["metadata"]["uid"])

    def observe(self, kind: str, event: Object) -> None:
        """Take in an event of a watch."""
        (self.remove if event["type"] == "DELETED" else self.put)(kind, event["object"])

    def vanished(self, kind: str, namespace: str | None, present: Container[str], list_version: int) -> list[Object]:
        """Return the known nodes, or pods, that a new list lacks. present: the uids in the list."""
        if kind == "Node":
            return [node for node in self._nodes.values() if node["metadata"]["uid"] not in present]
        return [{"metadata": {"uid": uid}} for uid in self._node_of if uid not in present]

    def snapshot(self, key: Key) -> Snapshot:
        """Return all nodes as they are now, for one job."""
        self._expire_promises()
        states = {name: self._state(name) for name in self._nodes}
        promise, retries = self._promises.get(key), self._retries.get(key)
        return Snapshot(
            key,
            states,
            self._sees_nodes,
            promised=promise.node if promise else None,
            refused=retries.nodes if retries else frozenset(),
            pause_s=max(0.0, retries.paused_until - self._clock()) if retries else 0.0,
        )

    def promise(self, key: Key, need: Need, node: str, *, for_s: float = PROMISE_S) -> None:
        """Keep room for the job for so many seconds, in place of what was kept before."""
        self._waiting.pop(key, None)
        promise = _Promise(node, need, self._clock() + for_s)
        before = self._promises.get(key)
        if before and (before.node, before.need) == (node, need):
            self._promises[key] = promise
            return
        self._end_promise(key)
        if for_s > 0:
            self._promises[key] = promise
            self._states.pop(node, None)

    def wait(self, key: Key, need: Need, *, started_at: str = "") -> None:
        """Note that the job has no room: `serve` looks for some when any is freed. started_at: its status.startTime."""
        self._end_promise(key)
        self._waiting[key] = need, started_at

    def give_up(self, key: Key, node: str | None) -> None:
        """Note that an attempt failed: the next one begins after a pause, twice as long each time."""
        self.stop_waiting(key)
        self._end_promise(key)
        known, now = self._retries.get(key), self._clock()
        if known and known.paused_until > now:  # the same attempt, whose end could not be written
            return
        failed = known.failed if known else 0
        pause_s = min(FIRST_PAUSE_S * 2.0**failed, LONGEST_PAUSE_S)
        nodes = (known.nodes if known else frozenset()) | ({node} if node else frozenset())
        self._retries[key] = Retries(failed + 1, now + pause_s, nodes)

    def succeed(self, key: Key) -> None:
        """Note that all pods of the job have their node: earlier attempts do not matter any more."""
        self._retries.pop(key, None)

    def unclaim(self, key: Key) -> None:
        """Keep no room for the job, and look for none."""
        self.stop_waiting(key)
        self._end_promise(key)

    def release(self, key: Key) -> None:
        """Forget everything about the job."""
        self._retries.pop(key, None)
        self.unclaim(key)

    def stop_waiting(self, key: Key) -> None:
        """Look for no room for the job; what is promised to it stays."""
        self._waiting.pop(key, None)

    def serve(self) -> list[Key]:
        """Promise freed room to waiting jobs, and return which got some: the highest priority, then the oldest, first.

        Only nodes where something was freed are looked at: the others were when the job began to wait.
        """
        self._expire_promises()
        freed, self._freed_nodes = self._freed_nodes, set()
        if not freed:
            return []
        served: list[Key] = []
        too_large: list[Need] = []  # jobs are often alike: what does not fit for one does not fit for the next
        for key in sorted(self._waiting, key=self._turn):
            need, _ = self._waiting[key]
            if need in too_large:
                continue
            if node := node_fit.choose_node(need, [self._state(name).seen_by(key, need) for name in freed]):
                self.promise(key, need, node)
                served.append(key)
            else:
                too_large.append(need)
        return served

    def _turn(self, key: Key) -> tuple[int, str]:
        need, started_at = self._waiting[key]
        return -need.priority, started_at

    def _state(self, name: str) -> NodeState:
        state = self._states.get(name)
        if state is None:
            pods = self._pods.get(name, {})
            held: dict[Hashable, Held] = {uid: pod.held for uid, pod in pods.items()}
            bound = {(pod.key, pod.role) for pod in pods.values() if pod.key}
            for key, promise in self._promises.items():
                for pod in promise.need.pods if promise.node == name else ():
                    if (key, pod.role) not in bound:
                        held[key, pod.role] = Held(pod.requests, promise.need.priority)
            state = self._states[name] = NodeState(self._nodes[name], held)
        return state

    def _expire_promises(self) -> None:
        now = self._clock()
        for key in [key for key, promise in self._promises.items() if promise.until <= now]:
            self._end_promise(key)

    def _end_promise(self, key: Key) -> None:
        promise = self._promises.pop(key, None)
        if promise:
            self._note_freed(promise.node)

    def _note_freed(self, node: str) -> None:
        self._states.pop(node, None)
        if node in self._nodes:
            self._freed_nodes.add(node)
            if self._waiting:
                self._freed()

    def _put_node(self, body: Object) -> None:
        name = body["metadata"]["name"]
        slim, known = _slim(body), self._nodes.get(name)
        self._nodes[name] = slim
        if known != slim:  # heartbeats change nothing here
            self._note_freed(name)

    def _forget_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._states.pop(name, None)
        self._freed_nodes.discard(name)
        for key, known in self._retries.items():  # another node of that name is another node
            self._retries[key] = replace(known, nodes=known.nodes - {name})

    def _put_pod(self, body: Object) -> None:
        metadata, spec = body["metadata"], body["spec"]
        uid, node = metadata["uid"], spec.get("nodeName")
        if not node or ended(body):
            self._drop_pod(uid)
            return
        self._pods[node][uid] = _Pod(
            held=Held(
                pod_requests(spec),
                spec.get("priority") or 0,
                any(owner["kind"] in _OF_EVERY_NODE for owner in metadata.get("ownerReferences") or ()),
            ),
            key=key_of("Pod", body),
            role=role_of(body),
        )
        self._node_of[uid] = node
        self._states.pop(node, None)

    def _drop_pod(self, uid: str) -> None:
        node = self._node_of.pop(uid, None)
        if node is None:
            return
        del self._pods[node][uid]
        if not self._pods[node]:
            del self._pods[node]
        self._note_freed(node)


def _minus(amounts: Amounts, used: Iterable[Amounts]) -> dict[str, float]:
    total = add_amounts(used)
    return {key: amount - total.get(key, 0) for key, amount in amounts.items()}


def _plus(amounts: Amounts, returned: Sequence[Amounts]) -> Amounts:
    if not returned:
        return amounts
    back = add_amounts(returned)
    return {key: amount + back.get(key, 0) for key, amount in amounts.items()}


def _slim(body: Object) -> dict[str, Any]:
    """Return the part of a node that placement looks at; a heartbeat changes nothing in it."""
    metadata, status, spec = body["metadata"], body.get("status", {}), body.get("spec", {})
    states = {item["type"]: item["status"] for item in status.get("conditions", [])}
    return {
        "metadata": {"name": metadata["name"], "uid": metadata["uid"], "labels": metadata.get("labels", {})},
        "spec": {"unschedulable": bool(spec.get("unschedulable")), "taints": spec.get("taints") or ()},
        "status": {"ready": states.get("Ready") == "True", "allocatable": parse_amounts(status.get("allocatable", {}))},
    }
