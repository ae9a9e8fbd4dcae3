"""The kopf operator: watches jobs and their children, hands every event to the controller, and nothing else.

Handlers are `on.event`: kopf keeps no state in the objects and needs no finalizer. It never retries; the queue does.
"""

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import aiohttp
import kopf
from kopf._cogs.clients import api

from stage2_controller import metrics, store
from stage2_controller.cluster.api_server import PAGE_OF_JOBS, NoCluster
from stage2_controller.loop.controller import Controller, Options, connect
from stage2_controller.spec import kinds, names
from stage2_controller.spec.kinds import Resource
from stage2_controller.spec.settings import Settings

_PAUSE_S = 1.0  # before a list begins again: one that always expires must not become a storm


@dataclass(frozen=True, kw_only=True)
class _Session(kopf.AiohttpSession):
    """A session that equals others with the same credentials: kopf ends where a login brings refused ones again."""

    aiohttp_session: aiohttp.ClientSession = field(compare=False)
    credentials: kopf.ConnectionInfo


def session_of(info: kopf.ConnectionInfo) -> kopf.AiohttpSession:
    """Return a session with these credentials, as kopf makes its own; called while the event loop runs."""
    made = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        middlewares=(_lists_again,),
    )
    return _Session(
        credentials=info,
        server=info.server,
        aiohttp_session=made,
        priority=info.priority,
        default_namespace=info.default_namespace,
        expiration=info.expiration,
    )


async def _lists_again(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    answer = await handler(request)
    if answer.status == HTTPStatus.GONE and "continue" in request.url.query:
        answer.release()
        await asyncio.sleep(_PAUSE_S)
        raise aiohttp.ClientPayloadError(f"{request.url.path}: the list expired before its last page: it begins again")
    return answer


def read_events_quickly() -> None:
    """Let kopf's watches read by `stage2_controller.store`."""
    api.json = SimpleNamespace(**{**vars(json), "loads": store.read})  # type: ignore[assignment, attr-defined]


def run(settings: Settings, options: Options) -> str | None:
    """Run until the process is told to end; return what else has ended it, or kept it from starting."""
    return asyncio.run(serve(settings, options))


async def serve(settings: Settings, options: Options) -> str | None:
    """Do so as a part of a loop that runs."""
    try:
        controller = await connect(settings, options)
    except NoCluster as error:
        return str(error)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(controller.stop)  # for kopf's cleanup, which it omits before its start is done
        if options.listen:
            host, port = options.listen
            try:
                served = await metrics.serve(controller.endpoints(), host=host, port=port)
            except OSError as error:
                return f"--listen: {host}:{port}: must be a free address of this machine ({error.strerror})"
            stack.push_async_callback(served.cleanup)
        read_events_quickly()
        with suppress(asyncio.CancelledError):
            await kopf.operator(
                registry=registry(controller, _watched(settings, options)),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not options.namespaces,
                namespaces=options.namespaces,
                stop_flag=controller.stop_flag,
            )
    return why_ended(controller)


def why_ended(controller: Controller) -> str | None:
    """Return what has ended a controller that nobody told to end."""
    if controller.lost:
        return "another controller leads now"
    if controller.blind:
        return controller.blind
    if controller.broken:
        return "a bug ended the controller; its traceback stands above"
    return None


def _watched(settings: Settings, options: Options) -> list[Resource]:
    return [*kinds.watched(kueue=settings.kueue), *((kinds.NODE,) if options.placement else ())]


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings without events of kopf's own and without a watch on CRDs.

    Lists come in pages, and the API server selects the children.
    """
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.scanning.disabled = True
    made.queueing.idle_timeout = 0.1  # so long kopf holds the last body of an object, whole: of 500 nodes 20 MB
    made.watching.chunk_size = PAGE_OF_JOBS  # for all kinds: kopf knows one size
    made.persistence.diffbase_storage = _NoDiffs()
    for resource in kinds.watched(kueue=True):
        if resource.kind != names.KIND:
            made.watching.label_selectors[resource.plural] = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
    return made


class _NoDiffs(kopf.DiffBaseStorage):
    """A storage that keeps kopf from copying each object to compare it with nothing: our handlers ask for no diff."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return nothing: no object is ever compared."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """Return nothing, which is what was stored."""
        return None

    def store(self, **_: Any) -> None:
        """Store nothing."""


def registry(controller: Controller, watched: list[Resource]) -> kopf.OperatorRegistry:
    """Return the handlers of one controller."""
    made = kopf.OperatorRegistry()

    @kopf.on.login(registry=made)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        info = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
        return session_of(info) if info else None

    @kopf.on.startup(registry=made)
    async def start(**_: Any) -> None:
        await controller.start()

    @kopf.on.cleanup(registry=made)
    async def stop(**_: Any) -> None:
        await controller.stop()

    for resource in watched:
        _watch(made, controller, resource)
    return made


def _watch(made: kopf.OperatorRegistry, controller: Controller, resource: Resource) -> None:
    @kopf.on.event(resource.api_version, resource.plural, registry=made, id=f"see-{resource.plural}")
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(resource.kind, event)
