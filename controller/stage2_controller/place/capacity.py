"""The free amounts of all nodes: what they can allocate, minus all pods, minus what jobs were promised.

One process holds it, and promises are made without waiting for anything in between: no two jobs get the same room.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stage2_controller.observed import Object, ended, role_of
from stage2_controller.place import node_fit, pod_requests
from stage2_controller.place.exclusions import Exclusions
from stage2_controller.place.longest_wait import LongestWait
from stage2_controller.place.node_fit import HOSTNAME, Need, NodeInfo
from stage2_controller.place.reservations import Reservations
from stage2_controller.spec.key import Key
from stage2_controller.spec.quantity import Amounts
from stage2_controller.store import key_of, version_of

NODES_A_CALL = 5_000  # that are looked at for jobs that wait: some 50 ms
KEYS_A_CALL = 1_000  # jobs that wait, of which most need the same as one before
ZONE = "topology.kubernetes.io/zone"
_OF_EVERY_NODE = ("DaemonSet", "Node")  # the owners of pods that a new node has too; Node: of static pods


@dataclass(frozen=True, slots=True)
class _Pod:
    """A pod that takes room on a node."""

    uid: str
    node: str
    requests: Amounts
    priority: int
    key: Key | None  # the job that it belongs to
    role: str | None
    version: int
    of_every_node: bool = False


@dataclass(frozen=True)
class _Room:
    """The room of a node in the eyes of a priority."""

    free: Amounts
    by_preemption: Amounts
    emptied: Amounts  # of all pods but those that every node has


@dataclass(frozen=True)
class _Promise:
    """Room on a node that is kept for a job."""

    node: str
    need: Need


class Capacity:
    """The account of all nodes. `freed` is called when something got free while a job waits for room."""

    def __init__(
        self,
        freed: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        patience_s: float = 0.0,
    ) -> None:
        self.freed = freed
        self._longest = LongestWait(patience_s, clock)
        self._nodes: dict[str, Object] = {}
        self._node_versions: dict[str, int] = {}  # of the newest news of each node, also of its end
        self._pods: dict[str, dict[str, _Pod]] = defaultdict(dict)  # by node and uid
        self._where: dict[str, str] = {}  # the node of each uid
        self._promises: dict[Key, _Promise] = {}
        self._bound: dict[tuple[str, Key, str | None], int] = defaultdict(int)  # pods by node, job and role
        # By node: pods by uid, promises by job and role.
        self._reservations: dict[str, Reservations] = defaultdict(Reservations)
        self._free: dict[str, dict[int, _Room]] = defaultdict(dict)  # by node and priority
        self._waiting: dict[Key, Need] = {}
        self._came: dict[Key, str] = {}  # when those that wait were started or resumed
        self._turn: deque[Key] = deque()  # who is to be looked at before the turn of those that wait begins anew
        self._too_large: set[str] = set()  # needs, while room only shrinks: they suit the next job no better
        self._freed_since = False  # something, since those were found
        self._freed_within = False  # something, since the turn began
        self._exclusions = Exclusions(clock)

    def put(self, kind: str, body: Object) -> None:
        """Take in the state of a Node or Pod."""
        if kind == "Node":
            self._put_node(body)
        elif kind == "Pod":
            self._put_pod(body)

    def remove(self, kind: str, body: Object) -> None:
        """Forget a Node or Pod."""
        if kind == "Node":
            name, version = body["metadata"]["name"], version_of(body)
            if version >= self._node_versions.get(name, 0):  # else it was made anew since
                self._forget_node(name)
                self._node_versions[name] = version
        elif kind == "Pod":
            self._drop(body["metadata"]["uid"])

    def retain_nodes(self, listed: Sequence[Object], list_version: int) -> None:
        """Make the nodes those of a list, as far as nothing newer is known of them.

        What it does not name, and was not seen after it was made, was deleted unnoticed.
        """
        for body in listed:
            self.put("Node", body)
        present = {body["metadata"]["uid"] for body in listed}
        for name, version in list(self._node_versions.items()):
            node = self._nodes.get(name)
            if version <= list_version and (node is None or node["metadata"]["uid"] not in present):
                self._forget_node(name)
                del self._node_versions[name]

    def retain_pods(self, present: Container[str], list_version: int) -> None:
        """Forget the pods that a list did not name by their uids, and that were not seen after it was made."""
        known = [pod for pods in self._pods.values() for pod in pods.values()]
        for pod in known:
            if pod.uid not in present and pod.version <= list_version:
                self._drop(pod.uid)

    def nodes_for(self, key: Key, need: Need) -> list[NodeInfo]:
        """Return all nodes with what is free on them for this job: others' promises count, its own does not."""
        return [self._info(name, node, key, need) for name, node in self._nodes.items()]

    def node_for(self, key: Key, need: Need, name: str) -> NodeInfo | None:
        """Return one of them; None if there is no such node."""
        node = self._nodes.get(name)
        return self._info(name, node, key, need) if node else None

    def node(self, name: str) -> Object | None:
        """Return the slim Node object."""
        return self._nodes.get(name)

    def promised(self, key: Key) -> str | None:
        """Return the node on which the job has room kept."""
        promise = self._promises.get(key)
        return promise.node if promise else None

    def promise(self, key: Key, need: Need, node: str) -> None:
        """Keep room for the job until `release`, `unclaim` or `wait`."""
        self._waits_no_more(key)
        made, before = _Promise(node, need), self._promises.get(key)
        if made == before:
            return
        self._end_promise(key)
        self._promises[key] = made
        self._reserve(key, made)
        if before:
            self._notify()

    def release(self, key: Key) -> None:
        """End the job's promise, and its wait, and forget which nodes it was refused."""
        self._exclusions.forget_job(key)
        self.unclaim(key)

    def retain_jobs(self, known: Container[Key]) -> None:
        """Release what is kept for other jobs than these, or known of them."""
        for key in {*self._promises, *self._waiting, *self._exclusions.jobs()}:
            if key not in known:
                self.release(key)

    def unclaim(self, key: Key) -> None:
        """End the job's promise, and its wait: others look after its place."""
        self._waits_no_more(key)
        if self._end_promise(key):
            self._notify()

    def wait(self, key: Key, need: Need, *, came: str = "") -> None:
        """Note that the job has no room yet: `serve` looks for some as soon as anything is freed.

        came: the job's start, by which jobs have their turn in the same order whichever controller looks.
        """
        if self._end_promise(key):
            self._notify()
        self._waiting[key], self._came[key] = need, came
        self._longest.begin(key)
        self._longest.choose_for(key, need, self._rooms)

    def serve(self) -> list[Key]:
        """Promise room to waiting jobs, and return who got some.

        First is the highest priority, of several the one for which a node is kept, then the first that came. Where very
        many jobs wait for very different things, the call asks by `freed` to be made again for the rest of them.
        """
        self._begin_turn()
        served: list[Key] = []
        looks = max(1, NODES_A_CALL // max(1, len(self._nodes)))
        for _ in range(min(len(self._turn), KEYS_A_CALL)):
            key = self._turn.popleft()
            need = self._waiting.get(key)
            told = repr(need)
            if need is None or told in self._too_large:
                continue
            if node := node_fit.choose_node(need, self.nodes_for(key, need)):
                self.promise(key, need, node)
                served.append(key)
            elif not self._exclusions.has_any(key):
                self._too_large.add(told)
            looks -= 1
            if not looks:
                break
        if self._turn or self._freed_since or self._freed_within:
            self.freed()
        return served

    def _begin_turn(self) -> None:
        """Let all that wait be looked at; within their turn those of a higher priority again, if room was freed."""
        if not self._turn:
            self._longest.choose(self._waiting, self._rooms)
            self._turn.extend(sorted(self._waiting, key=self._place_in_turn))
            self._freed_within = False
        elif self._freed_since:
            left = set(self._turn)
            next_one = max((self._waiting[key].priority for key in left if key in self._waiting), default=0)
            before = (key for key in self._waiting if key not in left and self._waiting[key].priority > next_one)
            self._turn.extendleft(sorted(before, key=self._place_in_turn, reverse=True))
            self._freed_within = True
        else:
            return
        self._too_large.clear()
        self._freed_since = False

    def _place_in_turn(self, key: Key) -> tuple[int, bool, str]:
        return -self._waiting[key].priority, not self._longest.first(key), self._came[key]

    def sees_why(self, key: Key, need: Need, node: str) -> bool:
        """Return whether it is known why the node does not take the job now: it is full, or cordoned."""
        return not self._has_room(key, need, node)

    def exclude(self, key: Key, node: str, *, zone: bool = False) -> None:
        """Take the node out of the job's choice for a while: the scheduler refused it there for a reason not seen here.

        zone: the others of its zone too, where a volume ties the job to another one.
        """
        for name in self._of_zone(node) if zone else (node,):
            self._exclusions.add(key, name)

    def excluded(self, key: Key) -> list[str]:
        """Return the hosts of the nodes that are out of the job's choice now."""
        labels = [self._nodes[name]["metadata"]["labels"] for name in self._exclusions.of(key) if name in self._nodes]
        return [its[HOSTNAME] for its in labels if HOSTNAME in its]

    def waiting(self) -> int:
        """Return how many jobs have no room."""
        return len(self._waiting)

    def _has_room(self, key: Key, need: Need, name: str) -> bool:
        """Return whether the node takes the whole job by what is known of it; its own pods there count as free."""
        info = self.node_for(key, need, name)
        if info is None:
            return False
        own = [pod for pod in self._pods.get(name, {}).values() if pod.key == key]
        lasting = [pod.requests for pod in own if pod.priority >= need.priority]
        as_if_alone = replace(
            info,
            kept=False,  # which ends, and says nothing of the node
            excluded=False,  # for a reason that is not known
            free=_plus(info.free, (pod.requests for pod in own)),
            free_by_preemption=_plus(info.free_by_preemption, lasting),
        )
        return node_fit.choose_node(need, [as_if_alone]) is not None

    def _rooms(self, key: Key, need: Need) -> list[NodeInfo]:
        """Return all nodes, as allocatable what is free there once the jobs of this controller have ended."""
        ending: dict[str, list[Amounts]] = defaultdict(list)
        for job, promise in self._promises.items():
            unbound = [pod for pod in promise.need.pods if not self._bound.get((promise.node, job, pod.role))]
            ending[promise.node] += [pod.requests for pod in unbound] if job != key else []
        for node, pods in self._pods.items():
            ending[node] += [pod.requests for pod in pods.values() if pod.key is not None]
        return [replace(info, allocatable=_plus(info.free, ending[info.name])) for info in self.nodes_for(key, need)]

    def ends_wait(self, key: Key) -> None:
        """End the job's wait; what is promised to it stays."""
        self._waits_no_more(key)

    def _waits_no_more(self, key: Key) -> None:
        self._waiting.pop(key, None)
        self._came.pop(key, None)
        if self._longest.end(key):
            self._notify()

    def _of_zone(self, node: str) -> list[str]:
        """Return the nodes of this one's zone; itself alone where it has none."""
        zones = {name: known["metadata"]["labels"].get(ZONE) for name, known in self._nodes.items()}
        zone = zones.get(node)
        return [name for name, its in zones.items() if its == zone] if zone else [node]

    def _end_promise(self, key: Key) -> bool:
        promise = self._promises.pop(key, None)
        if promise is None:
            return False
        for need in promise.need.pods:
            self._reservations[promise.node].remove((key, need.role))
        self._free.pop(promise.node, None)
        self._tidy(promise.node)
        return True

    def _reserve(self, key: Key, promise: _Promise) -> None:
        """Enter what is kept for those pods of the job that are not bound to the node yet."""
        reserved = self._reservations[promise.node]
        for need in promise.need.pods:
            if self._bound.get((promise.node, key, need.role)):
                reserved.remove((key, need.role))
            else:
                reserved.add((key, need.role), need.requests, promise.need.priority)
        self._free.pop(promise.node, None)

    def _count(self, pod: _Pod, by: int) -> None:
        """Count a pod of a job in or out: the promise stands for pods that are not there."""
        if pod.key is None:
            return
        place = pod.node, pod.key, pod.role
        self._bound[place] += by
        if not self._bound[place]:
            del self._bound[place]
        promise = self._promises.get(pod.key)
        if promise and promise.node == pod.node:
            self._reserve(pod.key, promise)

    def _notify(self) -> None:
        if self._waiting:
            self._freed_since = True
            self.freed()

    def _put_node(self, body: Object) -> None:
        name, version = body["metadata"]["name"], version_of(body)
        if version < self._node_versions.get(name, 0):
            return
        self._node_versions[name] = version
        slim = _slim(body)
        known = self._nodes.get(name)
        self._nodes[name] = slim
        if known != slim:  # heartbeats change nothing here
            self._free.pop(name, None)
            self._notify()

    def _forget_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._free.pop(name, None)
        self._exclusions.forget_node(name)
        self._tidy(name)

    def _tidy(self, node: str) -> None:
        """Drop the reservations of a node that has none: an autoscaler gives every new node another name."""
        if node not in self._pods and not self._reservations[node].total():
            del self._reservations[node]

    def _put_pod(self, body: Object) -> None:
        metadata, spec = body["metadata"], body["spec"]
        uid, node = metadata["uid"], spec.get("nodeName")
        if not node or ended(body):
            self._drop(uid)
            return
        known = self._pods[node].get(uid)
        if known and known.version > version_of(body):
            return
        pod = _Pod(
            uid=uid,
            node=node,
            requests=pod_requests.requests(spec, body.get("status") or {}),
            priority=spec.get("priority") or 0,
            key=key_of("Pod", body),
            role=role_of(body),
            version=version_of(body),
            of_every_node=any(owner["kind"] in _OF_EVERY_NODE for owner in metadata.get("ownerReferences") or ()),
        )
        self._where[uid] = node
        self._free.pop(node, None)
        self._pods[node][uid] = pod
        self._reservations[node].add(uid, pod.requests, pod.priority)
        if known is None or (known.key, known.role) != (pod.key, pod.role):  # whoever may edit a pod may relabel it
            if known:
                self._count(known, -1)
            self._count(pod, 1)

    def _drop(self, uid: str) -> None:
        node = self._where.pop(uid, None)
        if node is None:
            return
        pod = self._pods[node].pop(uid)
        self._reservations[node].remove(uid)
        self._free.pop(node, None)
        self._count(pod, -1)
        if not self._pods[node]:
            del self._pods[node]
            self._tidy(node)
        self._notify()

    def _info(self, name: str, node: Object, key: Key, need: Need) -> NodeInfo:
        room = self._room_on(name, node, key, need)
        return NodeInfo(
            name=name,
            labels=node["metadata"]["labels"],
            taints=node["spec"]["taints"],
            ready=node["status"]["ready"],
            cordoned=node["spec"]["unschedulable"],
            free=room.free,
            free_by_preemption=room.by_preemption,
            allocatable=room.emptied,
            excluded=self._exclusions.holds(key, name),
            kept=self._longest.keeps(name, key, need),
        )

    def _room_on(self, name: str, node: Object, key: Key, need: Need) -> _Room:
        """What is free, as it is and by preemption; kept until something on the node changes."""
        priority, reserved = need.priority, self._reservations[name]
        own = [entry for pod in need.pods if (entry := reserved.get((key, pod.role)))]
        kept = self._free[name].get(priority)
        if kept is None:
            allocatable = node["status"]["allocatable"]
            lasting = (pod.requests for pod in self._pods.get(name, {}).values() if pod.of_every_node)
            kept = _Room(
                free=_minus(allocatable, reserved.total()),
                by_preemption=_minus(allocatable, reserved.total(at_least=priority)),
                emptied=_minus(allocatable, pod_requests.added(lasting)),
            )
            self._free[name][priority] = kept
        if not own:
            return kept
        stronger = (amounts for amounts, mine in own if mine >= priority)
        free = _plus(kept.free, (amounts for amounts, _ in own))
        return replace(kept, free=free, by_preemption=_plus(kept.by_preemption, stronger))


def _minus(amounts: Amounts, used: Amounts) -> dict[str, float]:
    return {key: amount - used.get(key, 0) for key, amount in amounts.items()}


def _plus(amounts: Amounts, returned: Iterable[Amounts]) -> dict[str, float]:
    back = pod_requests.added(returned)
    return {key: amount + back.get(key, 0) for key, amount in amounts.items()}


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
            "allocatable": pod_requests.amounts(status.get("allocatable", {})),
        },
    }
