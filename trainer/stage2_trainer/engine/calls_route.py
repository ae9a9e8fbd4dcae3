"""The ASGI middleware that makes several calls of a server's own routes in one request (`wire.calls`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from stage2_trainer.engine.asgi import App, Receive, Scope, Send, answer, body_of
from stage2_trainer.engine.stuck_update import UPDATE_ROUTES
from stage2_trainer.wire.calls import OK, ROUTE, is_met

logger = logging.getLogger(__name__)

CALLED = UPDATE_ROUTES | {"/weight_info"}
KEPT_HEADERS = frozenset({b"host", b"authorization"})


class CallsRoute:
    """The ASGI middleware that answers POST /stage2/calls. The token guard stands before it.

    Each call goes through the whole application, as if it had come by itself: the guard, the watch of stuck updates,
    and the server's own handling of errors. None is begun once the learner has hung up: it might close what another
    learner has opened.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        calls = json.loads(await body_of(receive))["calls"]
        if strange := [call["path"] for call in calls if _route(call) not in CALLED]:
            await answer(send, 400, {"error": f"{strange[0]} is no route of an update: call it by itself"})
            return
        hung_up = asyncio.ensure_future(receive())
        answers: list[dict[str, Any]] = []
        try:
            for call in calls:
                if hung_up.done():
                    break
                status, content = await _made(scope, call, hung_up)
                answers.append({"status": status, "content": content})
                if status != OK or not _is_met(call.get("demand", {}), content):
                    break
        finally:
            hung_up.cancel()
        await answer(send, OK, {"answers": answers})


async def _made(scope: Scope, call: Mapping[str, Any], hung_up: asyncio.Future[Any]) -> tuple[int, str]:
    """Make a call; returns its status and what it is answered."""
    body = call.get("body", "").encode()
    requests: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body}]
    status, said = 500, bytearray()

    async def receive() -> MutableMapping[str, Any]:
        return requests.pop() if requests else await asyncio.shield(hung_up)

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        said.extend(message.get("body", b""))

    try:
        await scope["app"](_scope_of(scope, call, len(body)), receive, send)
    except Exception:  # the application has answered it, and passes it on to be logged
        logger.exception("%s %s", call["method"], call["path"])
    return status, said.decode(errors="replace")


def _scope_of(scope: Scope, call: Mapping[str, Any], length: int) -> Scope:
    path, _, query = call["path"].partition("?")
    headers = [header for header in scope["headers"] if header[0] in KEPT_HEADERS]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    asked = {"method": call["method"], "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    return {**scope, **asked, "headers": headers}


def _route(call: Mapping[str, Any]) -> str:
    return str(call["path"]).partition("?")[0]


def _is_met(demand: Mapping[str, Any], content: str) -> bool:
    try:
        return not demand or is_met(demand, json.loads(content))
    except ValueError:
        return False
