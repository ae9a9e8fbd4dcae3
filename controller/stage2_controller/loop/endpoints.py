"""The controller's HTTP endpoints: /healthz (start me anew?), /readyz (do I see the cluster?), /metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web


@dataclass(frozen=True)
class Endpoints:
    """The answers of the endpoints: a problem in a sentence, None if there is none."""

    problem: Callable[[], str | None]
    not_ready: Callable[[], str | None]
    metrics: Callable[[], tuple[bytes, str]]  # body and content type


async def serve(endpoints: Endpoints, *, host: str, port: int) -> web.AppRunner:
    """Listen until the runner is cleaned up."""

    async def healthz(_: web.Request) -> web.Response:
        return _told(endpoints.problem())

    async def readyz(_: web.Request) -> web.Response:
        return _told(endpoints.not_ready())

    async def metrics(_: web.Request) -> web.Response:
        body, content_type = endpoints.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    application = web.Application()
    application.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _told(problem: str | None) -> web.Response:
    return web.Response(text=problem or "ok", status=500 if problem else 200)
