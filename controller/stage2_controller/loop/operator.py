"""The kopf operator: kopf watches the jobs, and hands every event to the controller.

Handlers are `on.event`, so kopf keeps no state in the objects and needs no finalizer. It never retries them; the work
queue does.
"""

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from typing import Any

import kopf

from stage2_controller.cluster.api_server import PAGE_OF_JOBS, NoCluster
from stage2_controller.job import names
from stage2_controller.job.settings import Settings
from stage2_controller.loop import metrics
from stage2_controller.loop.controller import Controller, Options, connect


def run(settings: Settings, options: Options) -> str | None:
    """Run until a signal ends the process; return what else ended it, or kept it from starting."""
    return asyncio.run(serve(settings, options))


async def serve(settings: Settings, options: Options) -> str | None:
    """Run in a running event loop."""
    asyncio.get_running_loop().set_exception_handler(report_unless_closing)
    try:
        controller = await connect(settings, options)
    except NoCluster as error:
        return str(error)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(controller.stop)  # kopf omits its cleanup handler if startup has not finished
        if options.listen:
            host, port = options.listen
            try:
                probes = controller.problem, controller.not_ready, controller.figures
                served = await metrics.serve(*probes, options.listen, options.tls)
            except metrics.BadCertificate as error:
                return f"--tls: {options.tls}: must have tls.crt and its tls.key ({error})"
            except OSError as error:
                return f"--listen: {host}:{port}: must be a free address of this machine ({error.strerror})"
            stack.push_async_callback(served.cleanup)
        with suppress(asyncio.CancelledError):
            await kopf.operator(
                registry=registry(controller),
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not options.namespaces,
                namespaces=options.namespaces,
                stop_flag=controller.stop_flag,
            )
    return why_ended(controller)


def report_unless_closing(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an error of the event loop, but not of a watch that kopf 1.45 leaves to the end of the loop to close."""
    if "asyncgen" not in context:
        loop.default_exception_handler(context)


def why_ended(controller: Controller) -> str | None:
    """Return what ended a controller that no signal ended."""
    if controller.lost:
        return "another controller leads now"
    if controller.restored:
        return f"the API server was restored from a backup ({controller.restored}): everything has to be listed anew"
    if controller.broken:
        return "a bug ended the controller; the log has its traceback"
    return None


def registry(controller: Controller) -> kopf.OperatorRegistry:
    """Return kopf's handlers for one controller."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.login(registry=handlers)
    async def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        by_account = None if os.environ.get("KUBECONFIG") else kopf.login_with_service_account(**kwargs)
        return by_account or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=handlers)
    async def start(**_: Any) -> None:
        await controller.start()

    @kopf.on.cleanup(registry=handlers)
    async def stop(**_: Any) -> None:
        await controller.stop()

    @kopf.on.event(names.API_VERSION, names.PLURAL, registry=handlers)
    async def observe(event: kopf.RawEvent, **_: Any) -> None:
        controller.observe(names.KIND, event)

    return handlers


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings without kopf's own events and its watch on CRDs; lists are paged."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 0.1  # kopf holds the last body of a job for so long
    settings.watching.chunk_size = PAGE_OF_JOBS
    return settings
