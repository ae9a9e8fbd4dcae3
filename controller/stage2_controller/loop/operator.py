"""The kopf operator: watches jobs and their children, puts keys on the queue, and nothing else.

Handlers are `on.event`: kopf keeps no state in the objects and needs no finalizer. It never retries; the queue does.
"""

import asyncio
import logging
import platform
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from stage2_controller.cluster.api_server import Api, ApiRefused, connect
from stage2_controller.cluster.capacity import Capacity
from stage2_controller.cluster.cluster_pods_watch import ClusterPodsWatch, pod_events
from stage2_controller.cluster.election import Election
from stage2_controller.cluster.freshness import Freshness, Scope
from stage2_controller.cluster.progress_polls import ProgressPolls
from stage2_controller.cluster.progress_reader import ProgressReader
from stage2_controller.cluster.store import Store, key_of
from stage2_controller.job import kinds, names
from stage2_controller.job.key import Key
from stage2_controller.job.kinds import Resource
from stage2_controller.job.settings import Settings
from stage2_controller.loop import endpoints
from stage2_controller.loop.controller_metrics import CONTENT_TYPE, Metrics
from stage2_controller.loop.reconcile import Reconciler
from stage2_controller.loop.work_queue import WorkQueue

logger = logging.getLogger(__name__)

_SERVE_AFTER_S = 0.2


@dataclass(frozen=True)
class Options:
    """How one controller process works."""

    namespaces: Sequence[str] = ()  # empty: all
    concurrency: int = 8
    placement: bool = True  # choose nodes; needs to see nodes and all pods
    lease: tuple[str, str] | None = None  # namespace and name; None: there is no other controller
    listen: tuple[str, int] | None = None  # host and port of health and metrics


@dataclass
class Controller:
    """Everything that lives as long as the process."""

    settings: Settings
    options: Options = field(default_factory=Options)
    store: Store = field(default_factory=Store)
    capacity: Capacity | None = None
    queue: WorkQueue[Key] = field(init=False)
    reconciler: Reconciler = field(init=False)
    freshness: Freshness = field(init=False)
    metrics: Metrics = field(init=False)
    stop_flag: asyncio.Event = field(default_factory=asyncio.Event)
    lost: bool = False  # another one leads now
    broken: bool = False  # a bug ended what all jobs need
    ready: bool = False  # everything that exists is known
    _api: Api | None = None
    _serving: asyncio.TimerHandle | None = None
    _closers: list[Any] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _everywhere: ClusterPodsWatch | None = None  # where only some namespaces are served, and nodes are chosen

    async def start(self) -> None:
        """Connects, learns what exists, and starts to work. Raises kopf.TemporaryError while that cannot be."""
        if self._api is None:
            self._api = await self._connect()
        try:
            await self.freshness.fill()
            if self._everywhere:
                await self._everywhere.fill()
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            # Such as a definition that helm installed a moment ago and the API server does not serve yet.
            raise kopf.TemporaryError(str(error), delay=2) from error
        self._tasks = [self._task(self._work(self._api)), self._task(self.freshness.run())]
        if self._everywhere:
            self._tasks.append(self._task(self._everywhere.run()))
        self.ready = True
        logger.info("ready: %d jobs", len(list(self.store.known(names.KIND))))

    async def _connect(self) -> Api:
        self.metrics = Metrics(lambda: self.store.known(names.KIND))
        api = await connect(self.metrics.requested)
        progress = ProgressPolls(ProgressReader(), lambda key: self.queue.add(key), interval_s=self.settings.progress_s)
        self._closers = [api.close, progress.close]
        self.capacity = Capacity(self._serve_soon) if self.options.placement else None
        self.reconciler = Reconciler(
            api, self.store, progress, self.settings, metrics=self.metrics, capacity=self.capacity
        )
        self.queue = WorkQueue(self.reconciler, concurrency=self.options.concurrency)
        self.freshness = Freshness(
            api,
            self.store,
            self.queue.add,
            scope=Scope(self.options.namespaces, kueue=self.settings.kueue),
            capacity=self.capacity,
        )
        if self.capacity and self.options.namespaces:
            self._everywhere = ClusterPodsWatch(api, self.capacity, pod_events(api.watch))
        if self.options.listen:
            host, port = self.options.listen
            served = endpoints.Endpoints(self._problem, self._not_ready, self._measured)
            self._closers.append((await endpoints.serve(served, host=host, port=port)).cleanup)
        return api

    async def _work(self, api: Api) -> None:
        """Works on jobs: at once, or as long as the Lease is held. A leader that lost it ends the process."""
        if self.options.lease is None:
            await self._lead()
            return
        namespace, name = self.options.lease
        election = Election(api, name=name, namespace=namespace, identity=f"{platform.node()}_{uuid.uuid4().hex[:8]}")
        await election.acquire()
        self._closers.insert(0, election.release)
        work = self._task(self._lead())
        try:
            await election.hold()
            self.lost = True
            self.stop_flag.set()
        finally:
            work.cancel()
            self.metrics.leads.set(0)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task without which the process is of no use: an exception that ends the one ends the other."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The process ends: the kubelet starts it again, and the other replica takes over meanwhile."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("the controller ends: this is a bug, report it with the traceback", exc_info=error)
            self.broken = True
            self.stop_flag.set()

    async def _lead(self) -> None:
        self.reconciler.restore()
        for job in self.store.known(names.KIND):
            self.queue.add(Key(job["metadata"]["namespace"], job["metadata"]["name"]))
        self.metrics.leads.set(1)
        logger.info("works on %d jobs", len(list(self.store.known(names.KIND))))
        await self.queue.run()

    def _problem(self) -> str | None:
        return self.freshness.problem() if self.ready else None

    def _not_ready(self) -> str | None:
        return self.freshness.problem() if self.ready else "does not know yet what exists"

    def _measured(self) -> tuple[bytes, str]:
        self.metrics.queue_depth.set(self.queue.depth())
        self.metrics.unplaced.set(self.capacity.waiting() if self.capacity else 0)
        self.metrics.compared.set(self.freshness.age_s())
        return self.metrics.text(), CONTENT_TYPE

    def _serve_soon(self) -> None:
        """Many pods end at once: room is shared out once for all of them."""
        if self._serving is None:
            self._serving = asyncio.get_running_loop().call_later(_SERVE_AFTER_S, self._serve)

    def _serve(self) -> None:
        self._serving = None
        for key in self.capacity.serve() if self.capacity else ():
            self.queue.add(key)

    async def stop(self) -> None:
        """Ends in mid-pass without harm: the next start plans again from what it finds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for close in self._closers:
            await close()

    def observe(self, kind: str, event: kopf.RawEvent) -> None:
        """Takes in one watch event and asks for a pass over the job that it concerns."""
        body: Any = event["object"]
        gone = event["type"] == "DELETED"
        for keeper in (self.store, self.capacity):
            if keeper is not None:
                (keeper.remove if gone else keeper.put)(kind, body)
        key = key_of(kind, body)
        if key is None:
            return
        if kind == names.KIND and gone:
            self.queue.forget(key)
            self.reconciler.forget(key)
        else:
            self.queue.add(key)


def run(controller: Controller) -> None:
    """Runs until the process is told to end, or another controller leads."""
    kopf.run(
        registry=registry(controller),
        settings=settings(all_pods=controller.options.placement and not controller.options.namespaces),
        standalone=True,
        clusterwide=not controller.options.namespaces,
        namespaces=controller.options.namespaces,
        stop_flag=controller.stop_flag,
    )


def settings(*, all_pods: bool) -> kopf.OperatorSettings:
    """kopf without events of its own and without a watch on CRDs; the API server selects the children.

    `all_pods`: those of others are watched too, because they take room on nodes.
    """
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.persistence.diffbase_storage = _NoDiffs()
    for resource in kinds.watched(kueue=True):
        if resource.kind == names.KIND or (resource == kinds.POD and all_pods):
            continue
        made.watching.label_selectors[resource.plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    return made


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying every object of every event to compare it with nothing: our handlers ask for no diff."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Nothing of an object is ever compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Nothing was stored."""
        return None

    def store(self, **_: Any) -> None:
        """Nothing is stored."""


def registry(controller: Controller) -> kopf.OperatorRegistry:
    """The handlers of one controller."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=made)
    async def start(**_: Any) -> None:
        await controller.start()

    @kopf.on.cleanup(registry=made)
    async def stop(**_: Any) -> None:
        await controller.stop()

    options = controller.options
    for resource in (*kinds.watched(kueue=controller.settings.kueue), *((kinds.NODE,) if options.placement else ())):
        _watch(made, controller, resource)
    return made


def _watch(made: kopf.OperatorRegistry, controller: Controller, resource: Resource) -> None:
    @kopf.on.event(resource.api_version, resource.plural, registry=made, id=f"see-{resource.plural}")
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(resource.kind, event)
