"""Jobs that start at once under a ResourceQuota, second by second: with the quota counted beforehand, and without.

Job and ReplicaSet controllers, the scheduler and the API server's count are stand-ins. As in Kubernetes, a refused pod
is tried again after 1 s, doubling to a minute (Job) or a thousand seconds (ReplicaSet), and a pod counts until it has
ended. A job asks for 3 + 1 GPUs, and its node has room for all.
"""

import copy
from datetime import timedelta
from typing import Any, NamedTuple

import pytest

from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.state import conditions
from stage2_controller.state.store import Store
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.fake_server import Object, Server, reconciler

GPUS = f"requests.{n.GPU}"
OF_ROLE = {names.ROLE_LEARNER: ("Job", 1), names.ROLE_ROLLOUT: ("Deployment", 3)}
MOST_S = {"Job": 60.0, "Deployment": 1000.0}
GRACE_S = 5  # by the clock: the simulated one
"""How long a pod that has only just started takes to end."""


class Retry(NamedTuple):
    """The next try of a controller whose pod was refused."""

    at: float
    pause_s: float


class Namespace:
    """Jobs that are applied at the same moment, their pods, and a quota. counted: the controller sees the quota."""

    def __init__(self, jobs: int, *, gpus: int, counted: bool) -> None:
        self.now, self.gpus, self.counted = 0, gpus, counted
        self.keys = [Key("team-a", f"job-{index}") for index in range(jobs)]
        self.server, self.store = Server(), Store()
        self.nodes = n.capacity(n.node(gpus=64, has={"cpu": "999", "memory": "9999Gi"}))
        self.nodes._clock = lambda: float(self.now)
        self.passes = reconciler(
            self.server, self.store, capacity=self.nodes, clock=lambda: b.NOW + timedelta(seconds=self.now)
        )
        self.passes.quotas.freed = self.wake
        self.due: dict[Key, float] = dict.fromkeys(self.keys, 0.0)
        self.pods: dict[tuple[Key, str], Object] = {}
        self.retries: dict[str, Retry] = {}  # by the uid of a Job or Deployment
        self.refused = self.half_gpu_seconds = 0
        self.started: dict[str, int] = {}
        for key in self.keys:
            self.store.put(names.KIND, self.server.add(b.job(key.name)))

    def wake(self, key: Key) -> None:
        """Let a pass over the job begin now."""
        self.due[key] = self.now

    def timestamp(self, later_s: int = 0) -> str:
        """The time in the cluster, or so many seconds later."""
        return conditions.timestamp(b.NOW + timedelta(seconds=self.now + later_s))

    def used(self) -> int:
        """The GPUs of all pods that exist."""
        return sum(OF_ROLE[role][1] for _, role in self.pods)

    async def run(self, seconds: int) -> None:
        """Let so many seconds pass."""
        for _ in range(seconds):
            self.count()
            await self.plan()
            for role in OF_ROLE:  # a job's learner is created first
                for key in self.keys:
                    self.make(key, role)
            self.look()
            self.now += 1

    def count(self) -> None:
        """Let the controller see the quota as the API server counts it."""
        status = {"hard": {GPUS: str(self.gpus)}, "used": {GPUS: str(self.used())}}
        metadata = {"name": "gpus", "namespace": "team-a", "uid": "quota"}
        body = {"metadata": metadata, "spec": {"hard": status["hard"]}, "status": status}
        if self.counted:
            self.passes.quotas.observe("ResourceQuota", {"type": "MODIFIED", "object": body})

    async def plan(self) -> None:
        """Make the passes that are due; the API server dates what they create."""
        for key in [key for key, at in self.due.items() if at <= self.now]:
            self.due[key] = self.now + max(await self.passes(key) or 1e9, 1.0)
            for kind in kinds.ROLE_OF_PODS:
                if (child := self.child(key, kind)) and "creationTimestamp" not in child["metadata"]:
                    child["metadata"]["creationTimestamp"] = self.timestamp()
                    self.store.put(kind, child)

    def child(self, key: Key, kind: str) -> Object | None:
        """The Job or Deployment of a job."""
        return self.server.objects.get((kind, f"{key.name}-{'learner' if kind == 'Job' else 'rollout'}"))

    def make(self, key: Key, role: str) -> None:
        """Create the pod of a role where its Job or Deployment has none, or end it with that."""
        (kind, gpus), pod = OF_ROLE[role], self.pods.get((key, role))
        child = self.child(key, kind)
        if child is None and pod:
            self.end(key, role, pod)
        if child is None or pod or self.now < self.retries.get(child["metadata"]["uid"], Retry(0, 0)).at:
            return
        uid = child["metadata"]["uid"]
        if self.used() + gpus > self.gpus:
            self.refused += 1
            pause_s = min(self.retries[uid].pause_s * 2 if uid in self.retries else 1.0, MOST_S[kind])
            self.retries[uid] = Retry(self.now + pause_s, pause_s)
            if kind == "Deployment" and not child.get("status"):
                self.say(
                    key, kind, child, b.refused_by_quota("exceeded quota: gpus", at=b.NOW + timedelta(seconds=self.now))
                )
            return
        if kind == "Deployment":
            self.say(key, kind, child, {"replicas": 1})
        self.bind(key, role, child)

    def say(self, key: Key, kind: str, child: Object, status: Object) -> None:
        """Write the status of a Deployment."""
        child["status"] = status
        self.store.put(kind, child)
        self.wake(key)

    def bind(self, key: Key, role: str, child: Object) -> None:
        """Create a pod, and give it its node at once."""
        gpus = OF_ROLE[role][1]
        container = {"name": "x", "resources": {"limits": {n.GPU: str(gpus)}}}
        pod = b.pod(role, b.waiting("x", "ContainerCreating"), name=f"{key.name}-{role}-{self.now}")
        template: Any = copy.deepcopy(child["spec"]["template"]["metadata"])
        own = {names.ANNOTATION_JOB: key.name, names.ANNOTATION_JOB_UID: f"uid-of-{key.name}"}
        template["annotations"] = {**(template.get("annotations") or {}), **own}
        pod["metadata"] |= {**template, "uid": pod["metadata"]["name"], "creationTimestamp": self.timestamp()}
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self.timestamp()}
        pod["spec"] |= {"containers": [container]}
        pod["status"]["conditions"] = [scheduled]
        self.pods[key, role] = pod
        self.show(key, pod)

    def show(self, key: Key, pod: Object) -> None:
        """Let the watches report of a pod."""
        pod["metadata"]["resourceVersion"] = str(next(self.server.versions))
        self.store.put("Pod", copy.deepcopy(pod))
        self.nodes.put("Pod", pod)
        self.wake(key)

    def end(self, key: Key, role: str, pod: Object) -> None:
        """Delete a pod, or remove it once its time to end has passed."""
        until = pod["metadata"].get("deletionTimestamp")
        if until is None:
            pod["metadata"] |= {"deletionTimestamp": self.timestamp(GRACE_S), "deletionGracePeriodSeconds": GRACE_S}
            self.show(key, pod)
        elif until <= self.timestamp():
            del self.pods[key, role]
            self.store.remove("Pod", pod)
            self.nodes.remove("Pod", pod)
            self.wake(key)

    def look(self) -> None:
        """Note which jobs have all of their pods, and which hold GPUs with half of them."""
        for key in self.keys:
            roles = [role for there, role in self.pods if there == key]
            if len(roles) == len(OF_ROLE):
                self.started.setdefault(key.name, self.now)
            elif roles:
                self.half_gpu_seconds += OF_ROLE[roles[0]][1]


async def test_jobs_started_at_once_take_turns_and_no_pod_is_refused() -> None:
    namespace = Namespace(3, gpus=8, counted=True)
    await namespace.run(300)
    assert list(namespace.started.values()) == [0, 0]
    first = next(key for key in namespace.keys if key.name in namespace.started)
    there = namespace.server.objects[names.KIND, first.name]
    suspended = {**there, "spec": {**there["spec"], "suspend": True}}
    namespace.store.put(names.KIND, namespace.server.add(suspended, generation=2))
    namespace.wake(first)
    await namespace.run(GRACE_S + 5)
    assert len(namespace.started) == 3
    assert (namespace.refused, namespace.half_gpu_seconds) == (0, 0)


@pytest.mark.parametrize(
    ("jobs", "gpus", "counted", "started", "half_gpu_seconds", "events"),
    [
        (1, 3, True, 0, 0, 1),
        (1, 3, False, 0, 200, 30),
        (2, 4, True, 1, 0, 2),
        (2, 4, False, 0, 400, 60),
        (2, 7, True, 1, 0, 2),
        (2, 7, False, 1, 200, 31),
        (6, 8, True, 2, 0, 6),
        (6, 8, False, 0, 1200, 180),
    ],
)
async def test_jobs_share_quota_only_if_it_is_counted_before_pods_are_created(
    jobs: int, gpus: int, counted: bool, started: int, half_gpu_seconds: int, events: int
) -> None:
    """Decision 21. Otherwise each learner takes a GPU that other servers lack, and all try again in the same second."""
    namespace = Namespace(jobs, gpus=gpus, counted=counted)
    await namespace.run(3600)
    found = (len(namespace.started), namespace.half_gpu_seconds, len(namespace.server.events))
    assert found == (started, half_gpu_seconds, events)
