"""The controller of one process: its parts, and the tasks that run until it ends."""

import asyncio
import logging
import platform
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kopf

from stage2_controller.cluster import api_server
from stage2_controller.cluster.api_server import Api
from stage2_controller.cluster.election import Election
from stage2_controller.cluster.progress import ProgressPolls, ProgressReader
from stage2_controller.cluster.watches import FAILURES, Feed, Watches, WentBack
from stage2_controller.job import kinds, names
from stage2_controller.job.names import Key
from stage2_controller.job.settings import Settings
from stage2_controller.loop.metrics import Metrics
from stage2_controller.loop.reconcile import Reconciler
from stage2_controller.loop.work_queue import WorkQueue
from stage2_controller.place.capacity import Capacity
from stage2_controller.state.store import Store

logger = logging.getLogger(__name__)

LAG_INTERVAL_S = 0.05
LOGGED_LAG_S = 1.0
"""A block of the event loop of this length is logged as well as counted."""
_SERVE_AFTER_S = 0.2
_TAKES_ROOM = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"  # field selector of pods
_NO_LEASE_ANSWER_S = 600.0  # after which a replica that stands by is restarted
REST_S = 1.0
"""How long after a pass changes of its job are collected. On a quick cluster new children get pods and nodes in that
time, which is then one status instead of three. Kubernetes' Job controller waits as long (syncJobBatchPeriod)."""
_BLIND_S = 60.0  # after which a leader that cannot list what exists is restarted


@dataclass(frozen=True)
class Options:
    """The options of one controller process."""

    namespaces: Sequence[str] = ()  # empty: all
    concurrency: int = 8
    placement: bool = True  # choose nodes; needs to see nodes and all pods
    lease: tuple[str, str] | None = None  # namespace and name; None: there is no other controller
    listen: tuple[str, int] | None = None  # host and port of health and metrics
    tls: Path | None = None  # folder of their tls.crt and tls.key; None: plain HTTP


@dataclass
class Controller:
    """Everything that lives as long as the process. `connect` creates it."""

    api: Api
    store: Store
    queue: WorkQueue[Key]
    reconciler: Reconciler
    watches: Watches
    metrics: Metrics
    progress: ProgressPolls
    election: Election | None = None  # None: there is no other controller
    stop_flag: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False  # another controller leads now
    broken: bool = False  # a bug ended a task that all jobs need
    restored: str | None = None  # how it shows that the API server was restored from a backup
    ready: bool = False  # everything was listed
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _leading: asyncio.Task[None] | None = None
    _stopped: bool = False
    _unlisted: str | None = "does not know yet what exists"  # why it does not request the Lease
    _leads_since: float = 0.0

    async def start(self) -> None:
        """Wait for the Lease, where there is one; list what exists, and start to work.

        A replica requests the Lease only if it may list what exists, and makes no other request while it stands by.

        Raises:
            kopf.TemporaryError: what exists cannot be listed now.
        """
        if self.election and not self._tasks:
            with self._listing():
                await self.watches.try_lists()
            await self.election.acquire()
            self._leads_since = time.monotonic()
            self._tasks.append(self._task(self._hold(self.election)))
        with self._listing():
            await self.watches.fill()
        if self.lost:  # meanwhile
            return
        self._leading = self._task(self._lead())
        self._tasks += [
            self._leading,
            self._task(self._watch()),
            self._task(measure_lag(self.metrics.loop_lag.observe)),
        ]
        self.ready = True
        logger.info("ready: %d jobs", len(list(self.store.all_of(names.KIND))))

    @contextmanager
    def _listing(self) -> Iterator[None]:
        """Turn a refusal into the error that makes kopf call `start` again."""
        try:
            yield
        except FAILURES as error:
            # Such as a definition that helm installed a moment ago, which the API server does not serve yet.
            self._unlisted = f"cannot list what exists: {str(error) or type(error).__name__}"
            raise kopf.TemporaryError(self._unlisted, delay=2) from error
        self._unlisted = None

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

    def observe(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take in one watch event, and queue the job that it concerns."""
        body = event["object"]
        gone, key = event["type"] == "DELETED", self.store.key(kind, body)
        (self.store.remove if gone else self.store.put)(kind, body)
        if key is None:
            return
        if kind != names.KIND and self.store.one(names.KIND, key, key.name) is None:
            return  # the job is gone, or its own event is on its way
        if kind == names.KIND and self.store.one(kind, key, key.name) is None:  # no new job has taken the name
            self.queue.forget(key)
            self.reconciler.forget(key)
        elif kind == kinds.WORKLOAD.kind:
            self.queue.add_now(key)  # Kueue resets the message of a check within a second
        else:
            self.queue.add(key)

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

    async def _watch(self) -> None:
        """Follow all watches. If the API server returns to an older state, end: the next process lists all again."""
        try:
            await self.watches.run()
        except* WentBack as errors:
            self.restored = str(errors.exceptions[0])
            logger.critical("the API server was restored from a backup (%s): restarting", self.restored)
            self.stop_flag.set()

    async def _lead(self) -> None:
        for job in self.store.all_of(names.KIND):
            self.queue.add(Key(job["metadata"]["namespace"], job["metadata"]["name"]))
        self.metrics.leads.set(1)
        logger.info("reconciling %d jobs", len(list(self.store.all_of(names.KIND))))
        await self.queue.run()

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that the process cannot do without: an exception that ends it ends the process."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the process after a bug: the kubelet restarts it, and the other replica takes over meanwhile."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("the controller stops because of a bug: report it with this traceback", exc_info=error)
            self.broken = True
            self.stop_flag.set()

    def _stands_by(self) -> Election | None:
        return self.election if not self._tasks else None

    def problem(self) -> str | None:
        """Return why the process should be restarted; None while it works."""
        if standing_by := self._stands_by():
            return standing_by.problem(_NO_LEASE_ANSWER_S)
        if self._unlisted and self._leads_since and time.monotonic() - self._leads_since > _BLIND_S:
            return self._unlisted  # so that another replica may lead
        return self.watches.problem() if self.ready else None

    def not_ready(self) -> str | None:
        """Return why the process is not ready; None once it is."""
        if self._unlisted:
            return self._unlisted
        if standing_by := self._stands_by():
            return standing_by.not_ready()
        return self.watches.problem() if self.ready else "does not know yet what exists"

    def figures(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.metrics.queue_depth.set(self.queue.depth())
        self.metrics.compared.set(0 if self._stands_by() else self.watches.age_s())
        return self.metrics.text()


async def measure_lag(observe: Callable[[float], None]) -> None:
    """Report again and again by how many seconds a short sleep was late: a long computation delays every job."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        late_s = loop.time() - due
        observe(late_s)
        if late_s > LOGGED_LAG_S:
            logger.warning("the event loop was blocked for %.1f s: all jobs waited for one computation", late_s)


async def connect(settings: Settings, options: Options) -> Controller:
    """Return a controller that is connected and has listed nothing yet."""
    store = Store()
    metrics = Metrics(store, lambda key: progress.report_age_s(key))
    api = await api_server.connect(metrics.requested)

    def share_room() -> None:
        for key in capacity.serve():
            queue.add(key)

    loop = asyncio.get_running_loop()
    capacity = Capacity(lambda: loop.call_later(_SERVE_AFTER_S, share_room), sees_nodes=options.placement)
    progress = ProgressPolls(ProgressReader(), lambda key: queue.add(key), interval_s=settings.progress_s)
    reconciler = Reconciler(api, store, progress, settings, metrics=metrics, capacity=capacity)
    identity = f"{platform.node()}_{uuid.uuid4().hex[:8]}"
    queue: WorkQueue[Key] = WorkQueue(
        reconciler, owner_of=lambda key: key.namespace, concurrency=options.concurrency, rest_s=REST_S
    )
    quotas = reconciler.quotas
    quotas.freed = queue.add
    of_jobs = [
        Feed(
            resource.kind,
            lambda kind, event: controller.observe(kind, event),
            store.vanished,
            knows=store.knows,
            known_version=store.known_version,
            namespace=space,
            labels=None if resource.kind == names.KIND else f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}",
            by_kopf=resource.kind == names.KIND,
        )
        for resource in kinds.watched(kueue=settings.kueue)
        for space in options.namespaces or (None,)
    ]
    of_quotas = [
        Feed(kinds.RESOURCE_QUOTA.kind, quotas.observe, quotas.vanished, namespace=space)
        for space in options.namespaces or (None,)
    ]
    of_nodes = [
        Feed(kind, capacity.observe, capacity.vanished, fields=fields)
        for kind, fields in (("Node", None), ("Pod", _TAKES_ROOM))
        if options.placement
    ]
    controller = Controller(
        api=api,
        store=store,
        queue=queue,
        reconciler=reconciler,
        watches=Watches(api, [*of_jobs, *of_quotas, *of_nodes]),
        metrics=metrics,
        progress=progress,
        election=Election(api, *options.lease, identity=identity) if options.lease else None,
    )
    return controller
