"""The ASGI middleware that makes several calls of a server's own routes in one request (`wire.calls`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any

from stage2_trainer.sync.vllm.asgi import App, Receive, Scope, Send, answer, body_of
from stage2_trainer.sync.vllm.stuck_update import UPDATE_ROUTES
from stage2_trainer.wire.calls import OK, ROUTE, Call, CallAnswer, from_text, is_met

logger = logging.getLogger(__name__)

CALLED = UPDATE_ROUTES | {"/weight_info"}
KEPT_HEADERS = frozenset({b"host", b"authorization"})
OF_LINES = [(b"content-type", b"application/x-ndjson")]
BROKEN_OFF = CallAnswer(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer breaks off")


class CallsRoute:
    """The ASGI middleware that answers POST /stage2/calls. The token guard stands before it.

    Each call goes through the whole application, as if it had come by itself: the guard, the watch of stuck updates,
    and the server's own handling of errors. Its answer is sent at once, so the learner's patience is with each call.
    None is begun once the learner has hung up: it might close what another learner has opened.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ROUTE:
            await self._app(scope, receive, send)
            return
        if scope["method"] != "POST":
            await answer(send, HTTPStatus.METHOD_NOT_ALLOWED, {"error": f"{scope['method']}: POST {ROUTE}"})
            return
        try:
            calls = from_text(await body_of(receive))
        except ValueError as error:
            await answer(send, HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        if strange := [call.path for call in calls if call.route not in CALLED]:
            await answer(
                send, HTTPStatus.BAD_REQUEST, {"error": f"{strange[0]} is no route of an update: call it by itself"}
            )
            return
        await send({"type": "http.response.start", "status": OK, "headers": OF_LINES})
        hung_up = asyncio.ensure_future(receive())
        try:
            for call in calls:
                if hung_up.done():
                    break
                made = await _made(scope, call, hung_up)
                await send({"type": "http.response.body", "body": made.to_line(), "more_body": True})
                if made.status != OK or not is_met(call.demand, made.value()):
                    break
        finally:
            hung_up.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _made(scope: Scope, call: Call, hung_up: asyncio.Future[Any]) -> CallAnswer:
    """Make a call; returns what it is answered."""
    body = call.body.encode()
    requests: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body}]
    status, said, more = int(HTTPStatus.INTERNAL_SERVER_ERROR), bytearray(), True

    async def receive() -> MutableMapping[str, Any]:
        return requests.pop() if requests else await asyncio.shield(hung_up)

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, more
        status = message.get("status", status)
        said.extend(message.get("body", b""))
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)

    try:
        await scope["app"](_scope_of(scope, call, len(body)), receive, send)
    except Exception:  # the application has answered it, and passes it on to be logged
        logger.exception("%s %s", call.method, call.path)
    return BROKEN_OFF if more else CallAnswer(status, said.decode(errors="replace"))


def _scope_of(scope: Scope, call: Call, length: int) -> Scope:
    path, _, query = call.path.partition("?")
    headers = [header for header in scope["headers"] if header[0] in KEPT_HEADERS]
    headers += [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    asked = {"method": call.method, "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    return {**scope, **asked, "headers": headers}
