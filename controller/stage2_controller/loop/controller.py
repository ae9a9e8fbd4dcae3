"""The controller of one process: what it knows, what it works with, and the tasks that run until it ends."""

import asyncio
import logging
import platform
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from stage2_controller.cluster import api_server
from stage2_controller.cluster.api_server import Api, ApiRefused
from stage2_controller.cluster.election import DURATION_S, Election
from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.cluster.watches import ClusterPodsWatch, Freshness, Scope, pod_events
from stage2_controller.metrics import CONTENT_TYPE, Endpoints, Metrics
from stage2_controller.place.capacity import Capacity
from stage2_controller.reconcile import Reconciler
from stage2_controller.spec import kinds, names
from stage2_controller.spec.names import Key
from stage2_controller.spec.settings import Settings
from stage2_controller.store import Store, key_of
from stage2_controller.work_queue import WorkQueue

INTERVAL_S = 0.05
TOLD_S = 1.0
"""A block of this length is logged as well as counted."""

logger = logging.getLogger(__name__)


async def watch(observe: Callable[[float], None]) -> None:
    """Tell again and again by how many seconds a short sleep was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_S
        await asyncio.sleep(INTERVAL_S)
        late_s = loop.time() - due
        observe(late_s)
        if late_s > TOLD_S:
            logger.warning("the event loop stood still for %.1f s: all jobs waited for one computation", late_s)


_SERVE_AFTER_S = 0.2
_DEAF_S = 600.0  # without an answer about the Lease, after which one that stands by is started anew
REST_S = 1.0
"""How long after a pass news of its job wait for one another: what it has created is seen, made pods of and bound in
that time where the cluster is quick, and is one status instead of three. Kubernetes' own controller of Jobs waits as
long (syncJobBatchPeriod)."""
_UNJUDGED_S = 5.0  # in which the scheduler says of a new pod where it runs, or why nowhere; until then it is no news
_BLIND_S = 60.0  # without a picture of what exists, after which one that leads gives the Lease to another


@dataclass(frozen=True)
class Options:
    """The options of one controller process."""

    namespaces: Sequence[str] = ()  # empty: all
    concurrency: int = 8
    placement: bool = True  # choose nodes; needs to see nodes and all pods
    lease: tuple[str, str] | None = None  # namespace and name; None: there is no other controller
    listen: tuple[str, int] | None = None  # host and port of health and metrics


@dataclass
class Controller:
    """Everything that lives as long as the process. `connect` makes one."""

    api: Api
    store: Store
    queue: WorkQueue[Key]
    reconciler: Reconciler
    freshness: Freshness
    metrics: Metrics
    progress: ProgressPolls
    capacity: Capacity | None = None  # None: the scheduler alone chooses nodes
    pods_watch: ClusterPodsWatch | None = None  # where nodes are chosen
    election: Election | None = None  # None: there is no other controller
    stop_flag: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False  # another one leads now
    broken: bool = False  # a bug ended what all jobs need
    blind: str = ""  # why it leads no more: what exists could not be listed
    ready: bool = False  # everything that exists is known
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _leading: asyncio.Task[None] | None = None
    _stopped: bool = False
    _unlisted: str | None = "does not know yet what exists"  # why it does not ask for the Lease
    _leads_since: float = 0.0

    async def start(self) -> None:
        """Wait for the Lease, where there is one; learn what exists, and start to work.

        Only one that may list what exists asks for the Lease; while it stands by it asks for nothing else. Raise
        kopf.TemporaryError while what exists cannot be listed; one that leads and cannot for long ends.
        """
        if self.election and not self._tasks:
            with self._listing():
                await self.freshness.try_lists()
            await self.election.acquire()
            self._leads_since = time.monotonic()
            self._tasks.append(self._task(self._hold(self.election)))
        with self._listing():
            await self.freshness.fill()
        if self.lost:  # meanwhile
            return
        self._leading = self._task(self._lead())
        self._tasks += [
            self._leading,
            self._task(self.freshness.run()),
            self._task(watch(self.metrics.loop_lag.observe)),
        ]
        self.ready = True
        logger.info("ready: %d jobs", len(list(self.store.known(names.KIND))))

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Turn a refusal into kopf's error that has `start` called again."""
        try:
            yield
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            # Such as a definition that helm installed a moment ago and the API server does not serve yet.
            self._unlisted = f"cannot list what exists: {str(error) or type(error).__name__}"
            if self._leads_since and time.monotonic() - self._leads_since > _BLIND_S:
                self._end_blind(self._unlisted)
            raise kopf.TemporaryError(self._unlisted, delay=2) from error
        self._unlisted = None

    def _end_blind(self, why: str) -> None:
        """End the process, so that another replica may lead."""
        self.blind = why
        self.stop_flag.set()

    async def stop(self) -> None:
        """End in mid-pass without harm: the next start plans again from what it finds. Later calls do nothing."""
        if self._stopped:
            return
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.election:
            await self.election.release()
        await self.api.close()
        await self.progress.close()

    def observe(self, kind: str, event: kopf.RawEvent) -> None:
        """Take in one watch event and ask for a pass over the job that it concerns."""
        body: Any = event["object"]
        gone = event["type"] == "DELETED"
        counted = kind == kinds.REPLICA_SET.kind and not gone and self._knows(kind, body)
        (self.store.remove if gone else self.store.put)(kind, body)
        if self.capacity and kind == "Node":
            (self.capacity.remove if gone else self.capacity.put)(kind, body)
        key = key_of(kind, body)
        if key is None or counted:
            return
        if kind != names.KIND and self.store.one(names.KIND, key, key.name) is None:
            return  # the job is gone, or its own event is on its way
        if kind == names.KIND and self.store.one(kind, key, key.name) is None:  # not one of its name that came since
            self.queue.forget(key)
            self.reconciler.forget(key)
        elif kind == "Pod" and not gone and _is_unjudged(body):
            self.queue.add_after(key, _UNJUDGED_S)
        elif kind == kinds.WORKLOAD.kind:
            self.queue.add_now(key)  # Kueue takes a check's word back within the second
        else:
            self.queue.add(key)

    def _knows(self, kind: str, body: Any) -> bool:
        """Whether an object is known with these owners: how many pods a ReplicaSet has is no reason for a pass."""
        key = key_of(kind, body)
        known = self.store.one(kind, key, body["metadata"]["name"]) if key else None
        return known is not None and known["metadata"].get("ownerReferences") == body["metadata"].get("ownerReferences")

    def endpoints(self) -> Endpoints:
        """Return what the HTTP endpoints tell of this controller."""
        return Endpoints(self._problem, self._not_ready, self._measured)

    async def _hold(self, election: Election) -> None:
        """Keep the Lease. A leader that lost it ends the process."""
        try:
            await election.hold()
            self.lost = True
            self.stop_flag.set()
        finally:
            if self._leading:
                self._leading.cancel()
            self.metrics.leads.set(0)

    async def _lead(self) -> None:
        if self.pods_watch:  # only who chooses nodes has to know what takes their room
            try:
                await self.pods_watch.fill_for_sure(_BLIND_S)
            except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
                self._end_blind(f"cannot list the pods of all namespaces: {str(error) or type(error).__name__}")
                return
            self._tasks.append(self._task(self.pods_watch.run()))
        self.reconciler.restore()
        for job in self.store.known(names.KIND):
            self.queue.add(Key(job["metadata"]["namespace"], job["metadata"]["name"]))
        self.metrics.leads.set(1)
        logger.info("works on %d jobs", len(list(self.store.known(names.KIND))))
        await self.queue.run()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task without which the process is of no use: an exception that ends the one ends the other."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the process after a bug: the kubelet starts it again, and the other replica takes over meanwhile."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("the controller ends: this is a bug, report it with the traceback", exc_info=error)
            self.broken = True
            self.stop_flag.set()

    def _stands_by(self) -> Election | None:
        return self.election if not self._tasks else None

    def _problem(self) -> str | None:
        if standing_by := self._stands_by():
            return standing_by.problem(_DEAF_S)
        return self._deaf() if self.ready else None

    def _deaf(self) -> str | None:
        return self.freshness.problem() or (self.pods_watch.problem() if self.pods_watch else None)

    def _not_ready(self) -> str | None:
        if self._unlisted:
            return self._unlisted
        if standing_by := self._stands_by():
            return standing_by.problem(DURATION_S) if standing_by.heard else "has not heard of the Lease yet"
        return self._deaf() if self.ready else "does not know yet what exists"

    def _measured(self) -> tuple[bytes, str]:
        self.metrics.queue_depth.set(self.queue.depth())
        self.metrics.unplaced.set(self.capacity.waiting() if self.capacity else 0)
        self.metrics.compared.set(0 if self._stands_by() else self.freshness.age_s())
        return self.metrics.text(), CONTENT_TYPE


def _is_unjudged(pod: Any) -> bool:
    """Whether the scheduler has said nothing of a pod yet."""
    judged = pod.get("spec", {}).get("nodeName") or pod.get("status", {}).get("conditions")
    return not judged and "deletionTimestamp" not in pod["metadata"]


class SoonOnce:
    """A call that is made a moment after it was asked for, once for all that ask until then."""

    def __init__(self, call: Callable[[], None], after_s: float) -> None:
        self._call = call
        self._after_s = after_s
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        """Ask for a call."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._now)

    def _now(self) -> None:
        self._timer = None
        self._call()


async def connect(settings: Settings, options: Options) -> Controller:
    """Return a controller that is connected and knows nothing yet."""
    store = Store()
    metrics = Metrics(lambda: store.known(names.KIND))
    api = await api_server.connect(metrics.requested)

    def share_room() -> None:
        for key in capacity.serve() if capacity else ():
            queue.add(key)

    capacity = Capacity(SoonOnce(share_room, _SERVE_AFTER_S)) if options.placement else None
    progress = ProgressPolls(ProgressReader(), lambda key: queue.add(key), interval_s=settings.progress_s)
    reconciler = Reconciler(api, store, progress, settings, metrics=metrics, capacity=capacity)
    queue: WorkQueue[Key] = WorkQueue(
        reconciler, owner_of=lambda key: key.namespace, concurrency=options.concurrency, rest_s=REST_S
    )
    scope = Scope(options.namespaces, kueue=settings.kueue)
    return Controller(
        api=api,
        store=store,
        queue=queue,
        reconciler=reconciler,
        freshness=Freshness(api, store, queue.add, scope=scope, capacity=capacity),
        metrics=metrics,
        progress=progress,
        capacity=capacity,
        pods_watch=ClusterPodsWatch(api, capacity, pod_events(api.watch)) if capacity else None,
        election=_election(api, *options.lease) if options.lease else None,
    )


def _election(api: Api, namespace: str, name: str) -> Election:
    return Election(api, name=name, namespace=namespace, identity=f"{platform.node()}_{uuid.uuid4().hex[:8]}")
