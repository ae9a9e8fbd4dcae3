"""The kopf operator: kopf watches jobs and their children, and hands every event to the controller.

Handlers are `on.event`, so kopf keeps no state in the objects and needs no finalizer. It never retries them; the work
queue does.
"""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import kopf
from kopf._cogs.clients import api as kopf_api

from stage2_controller import metrics, store
from stage2_controller.cluster.api_server import PAGE_OF_JOBS, NoCluster
from stage2_controller.loop.controller import Controller, Options, connect
from stage2_controller.spec import kinds, names
from stage2_controller.spec.kinds import Resource
from stage2_controller.spec.settings import Settings


def run(settings: Settings, options: Options) -> str | None:
    """Run until a signal ends the process; return what else ended it, or kept it from starting."""
    return asyncio.run(serve(settings, options))


async def serve(settings: Settings, options: Options) -> str | None:
    """Run in a running event loop."""
    try:
        controller = await connect(settings, options)
    except NoCluster as error:
        return str(error)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(controller.stop)  # kopf omits its cleanup handler if startup has not finished
        if options.listen:
            host, port = options.listen
            try:
                served = await metrics.serve(
                    problem=controller.problem,
                    not_ready=controller.not_ready,
                    figures=controller.figures,
                    host=host,
                    port=port,
                )
            except OSError as error:
                return f"--listen: {host}:{port}: must be a free address of this machine ({error.strerror})"
            stack.push_async_callback(served.cleanup)
        decode_events_quickly()
        with suppress(asyncio.CancelledError):
            await kopf.operator(
                registry=registry(controller, kueue=settings.kueue),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not options.namespaces,
                namespaces=options.namespaces,
                stop_flag=controller.stop_flag,
            )
    return why_ended(controller)


def why_ended(controller: Controller) -> str | None:
    """Return what ended a controller that no signal ended."""
    if controller.lost:
        return "another controller leads now"
    if controller.broken:
        return "a bug ended the controller; the log has its traceback"
    return None


def registry(controller: Controller, *, kueue: bool) -> kopf.OperatorRegistry:
    """Return kopf's handlers for one controller."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=handlers)
    async def start(**_: Any) -> None:
        await controller.start()

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await controller.stop()

    for resource in kinds.watched(kueue=kueue):
        _watch(handlers, controller, resource)
    return handlers


def _watch(handlers: kopf.OperatorRegistry, controller: Controller, resource: Resource) -> None:
    @kopf.on.event(resource.api_version, resource.plural, registry=handlers, id=f"see-{resource.plural}")
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(resource.kind, event)


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings without kopf's own events and its watch on CRDs; lists are paged and children selected."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 0.1  # kopf holds the last body of an object for so long; 500 nodes take 20 MB
    settings.watching.chunk_size = PAGE_OF_JOBS  # for all kinds: kopf knows one size
    settings.persistence.diffbase_storage = _NoDiffs()
    for resource in kinds.watched(kueue=True):
        if resource.kind != names.KIND:
            settings.watching.label_selectors[resource.plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    return settings


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying each object for a diff, which no handler of ours uses."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing to compare."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return nothing, which is what was stored."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


def decode_events_quickly() -> None:
    """Let kopf decode events with orjson: the standard library's json takes a fifth of the controller's time.

    kopf 1.45 has no setting for it; once it has one, this function goes.
    """
    decoder = SimpleNamespace(**{**vars(json), "loads": store.read})
    kopf_api.json = decoder  # type: ignore[assignment, attr-defined]
