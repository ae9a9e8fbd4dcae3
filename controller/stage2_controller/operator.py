"""The kopf operator: watches jobs and their children, puts keys on the queue, and nothing else.

Handlers are `on.event`: kopf keeps no state in the objects and needs no finalizer. It never retries; the queue does.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from stage2_controller import names
from stage2_controller.apply import ApiRefused, connect
from stage2_controller.capacity import Capacity
from stage2_controller.freshness import Freshness
from stage2_controller.observe import Key, Store, key_of
from stage2_controller.plan import Settings
from stage2_controller.progress import ProgressReader
from stage2_controller.queue import WorkQueue
from stage2_controller.reconcile import Reconciler

logger = logging.getLogger(__name__)

# (kind, API group and version, plural) of everything that is watched.
_WATCHED = (
    (names.KIND, names.API_VERSION, names.PLURAL),
    ("Deployment", "apps/v1", "deployments"),
    ("Job", "batch/v1", "jobs"),
    ("Service", "v1", "services"),
    ("Pod", "v1", "pods"),
)
_NODES = (("Node", "v1", "nodes"),)
_SERVE_AFTER_S = 0.2


@dataclass
class Controller:
    """Everything that lives as long as the process."""

    settings: Settings
    namespaces: Sequence[str] = ()  # empty: all
    concurrency: int = 8
    placement: bool = True  # choose nodes; needs to see nodes and all pods
    store: Store = field(default_factory=Store)
    queue: WorkQueue[Key] = field(init=False)
    reconciler: Reconciler = field(init=False)
    freshness: Freshness = field(init=False)
    capacity: Capacity | None = None
    _serving: asyncio.TimerHandle | None = None
    ready: bool = False  # everything that exists is known
    _closers: list[Any] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        """Connects, learns what exists, and starts to work. Raises kopf.TemporaryError while that cannot be."""
        if not self._closers:
            await self._connect()
        try:
            await self.freshness.fill()
        except (ApiRefused, aiohttp.ClientError, TimeoutError) as error:
            # Such as a definition that helm installed a moment ago and the API server does not serve yet.
            raise kopf.TemporaryError(str(error), delay=2) from error
        self.reconciler.restore()
        self._tasks = [asyncio.create_task(self.queue.run()), asyncio.create_task(self.freshness.run())]
        self.ready = True
        logger.info("ready: %d jobs", len(list(self.store.known(names.KIND))))

    async def _connect(self) -> None:
        api, progress = await connect(), ProgressReader()
        self._closers = [api, progress]
        self.capacity = Capacity(self._serve_soon) if self.placement else None
        self.reconciler = Reconciler(api, self.store, progress, self.settings, capacity=self.capacity)
        self.queue = WorkQueue(self.reconciler, concurrency=self.concurrency)
        self.freshness = Freshness(api, self.store, self.queue.add, namespaces=self.namespaces, capacity=self.capacity)

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
        for closer in self._closers:
            await closer.close()

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


def run(controller: Controller, *, liveness_endpoint: str | None) -> None:
    """Runs until the process is told to end."""
    kopf.run(
        registry=registry(controller),
        settings=settings(all_pods=controller.placement),
        standalone=True,
        clusterwide=not controller.namespaces,
        namespaces=controller.namespaces,
        liveness_endpoint=liveness_endpoint,
    )


def settings(*, all_pods: bool) -> kopf.OperatorSettings:
    """kopf without events of its own and without a watch on CRDs; the API server selects the children.

    `all_pods`: those of others are watched too, because they take room on nodes.
    """
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    for _, _, plural in _WATCHED[1:]:
        if plural == "pods" and all_pods:
            continue
        made.watching.label_selectors[plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    return made


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

    @kopf.on.probe(registry=made, id="watches")
    async def watches(**_: Any) -> str:
        problem = controller.freshness.problem() if controller.ready else "not started yet"
        if problem:
            raise kopf.PermanentError(problem)  # the probe answers 500, and the kubelet starts the controller anew
        return "fresh"

    for kind, api_version, plural in (*_WATCHED, *(_NODES if controller.placement else ())):
        _watch(made, controller, kind=kind, api_version=api_version, plural=plural)
    return made


def _watch(made: kopf.OperatorRegistry, controller: Controller, *, kind: str, api_version: str, plural: str) -> None:
    @kopf.on.event(api_version, plural, registry=made, id=f"see-{plural}")
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(kind, event)
