"""stage2's own routes on a rollout server, and the watch over weight updates: ASGI middlewares for vLLM and the stub.

The token guard (`serve.guard`) stands before both, so no stranger reaches them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_trainer.sync.tensors.announcement import FOLDER_ROUTE
from stage2_trainer.sync.tensors.model_folder import folder_digests
from stage2_trainer.sync.vllm.vllm_compat import engine_words
from stage2_trainer.wire.identity import ENGINE, IDENTITY_ROUTE, describe
from stage2_trainer.wire.update_routes import INIT_ROUTE, UPDATE_ROUTES

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

DEFAULT_PATIENCE_S = 480.0  # before a group was formed: twice the default of `vllm.server.timeout_s`
LOADING_S = 120.0  # to load what had arrived
ENGINE_CHECK_S = 1.0
STUCK = {"error": "a weight update that no learner waits for does not end; start this server again"}
DEAD = {"error": "the engine of this server has died; it must be started again"}
STOPPED = {"error": "this server was asked to stop"}


class Stage2Routes:
    """The middleware that answers stage2's own routes: the server's identity, and its folder's digests.

    When the server is asked to stop, it answers 503 to the requests that it drops. uvicorn, and vLLM once its engine
    has ended, answer 500, which a learner takes for a refusal.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = False

        async def note(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            began = True
            if message.get("status") == HTTPStatus.INTERNAL_SERVER_ERROR and _engine_is_dead(scope):
                message["status"] = int(HTTPStatus.SERVICE_UNAVAILABLE)
            await send(message)

        try:
            await self._answer(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http" or began:
                raise
            await send_json(send, HTTPStatus.SERVICE_UNAVAILABLE, STOPPED)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, handle = ROUTES.get(scope["path"], ("", None)) if scope["type"] == "http" else ("", None)
        if handle is None:
            await self._app(scope, receive, send)
        elif scope["method"] != method:
            error = {"error": f"{scope['method']}: {method} {scope['path']}"}
            await send_json(send, HTTPStatus.METHOD_NOT_ALLOWED, error)
        else:
            await handle(scope, receive, send)


class UpdateWatch:
    """The middleware that watches the calls of a weight update: /health reports a stuck one, a dead engine ends them.

    Every wait of a receiver ends: at once when the learner has gone, else at the deadline that the learner gave with
    the group. A call that lasts long after its learner has hung up is stuck, and only a restart helps; until then the
    server would answer 200 and never take weights again.

    When vLLM's engine process dies, its server closes the port and waits for the calls under way. Nobody answers those
    that wait for the engine, so the server would be neither up nor restarted.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._patience_s = DEFAULT_PATIENCE_S
        self._abandoned: dict[object, float] = {}  # calls whose learner has hung up, and since when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HEALTH_ROUTE and self._is_stuck():
            await send_json(send, HTTPStatus.SERVICE_UNAVAILABLE, STUCK)
        elif scope["type"] == "http" and scope["path"] in UPDATE_ROUTES:
            await self._watch(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_stuck(self) -> bool:
        limit_s = self._patience_s + LOADING_S
        return any(time.monotonic() - since > limit_s for since in self._abandoned.values())

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a call, and note when the learner stops waiting for it."""
        body = await read_body(receive)
        if scope["path"] == INIT_ROUTE:
            self._patience_s = _patience(body)
        hung_up = asyncio.ensure_future(receive())
        call = asyncio.ensure_future(self._app(scope, _replay(body, hung_up), send))
        try:
            if await self._ends(call, hung_up, scope):
                await call
            else:
                call.cancel()
                await send_json(send, HTTPStatus.SERVICE_UNAVAILABLE, DEAD)
        finally:
            call.cancel()  # where this is cancelled itself
            self._abandoned.pop(call, None)
            hung_up.cancel()

    async def _ends(self, call: asyncio.Future[None], hung_up: asyncio.Future[Any], scope: Scope) -> bool:
        """Wait for a call. Returns False if the engine died first."""
        waited = {call, hung_up}
        while not call.done():
            ended, _ = await asyncio.wait(waited, timeout=ENGINE_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if hung_up in ended:
                self._abandoned[call] = time.monotonic()
                waited = {call}
            if not ended and _engine_is_dead(scope):
                return False
        return True


async def _identity(scope: Scope, _receive: Receive, send: Send) -> None:
    """GET /stage2/identity: how this server reads prompts (`wire.identity`), and what computes its answers."""
    state = scope["app"].state
    found = await asyncio.to_thread(lambda: describe(_processor(state)))
    await send_json(send, HTTPStatus.OK, {**found, ENGINE: _engine(state)})


async def _folder_digests(scope: Scope, receive: Receive, send: Send) -> None:
    """POST /stage2/folder-digests: digests of tensors in the server's model folder."""
    try:
        tensors = [(str(name), str(dtype)) for name, dtype in json.loads(await read_body(receive))["tensors"]]
    except (ValueError, KeyError, TypeError) as error:
        await send_json(send, HTTPStatus.UNPROCESSABLE_ENTITY, {"error": f"not a list of tensors: {error!r}"})
        return
    try:
        found = await asyncio.to_thread(folder_digests, _model_folder(scope["app"].state), tensors)
    except OSError as error:
        await send_json(send, HTTPStatus.CONFLICT, {"error": str(error)})
        return
    await send_json(send, HTTPStatus.OK, {"digests": found})


ROUTES: dict[str, tuple[str, Callable[[Scope, Receive, Send], Awaitable[None]]]] = {
    IDENTITY_ROUTE: ("GET", _identity),
    FOLDER_ROUTE: ("POST", _folder_digests),
}


def _replay(body: bytes, hung_up: asyncio.Future[Any]) -> Receive:
    """Return a receiver that yields a body that was read already, then waits for the caller to hang up."""
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body}]

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await asyncio.shield(hung_up)

    return receive


async def read_body(receive: Receive) -> bytes:
    """Return a request's body."""
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def send_json(send: Send, status: int, content: object, *headers: tuple[bytes, bytes]) -> None:
    """Send a JSON answer."""
    body = json.dumps(content).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": int(status), "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})


def _processor(state: Any) -> Any:
    """Return the processor that the running engine uses; the stub names its own."""
    if hasattr(state, "processor"):
        return state.processor
    from vllm.transformers_utils.processor import cached_processor_from_config

    return cached_processor_from_config(state.vllm_config.model_config)


def _engine(state: Any) -> str:
    return engine_words(state.vllm_config) if hasattr(state, "vllm_config") else "the CPU stub"


def _model_folder(state: Any) -> str:
    return str(state.model_folder if hasattr(state, "model_folder") else state.vllm_config.model_config.model)


def _engine_is_dead(scope: Scope) -> bool:
    """Whether vLLM's engine process has ended; the stub has none."""
    state = getattr(scope.get("app"), "state", None)
    return bool(getattr(getattr(state, "engine_client", None), "errored", False))


def _patience(init_request: bytes) -> float:
    """Return the deadline of a receiver's waits from the learner's request; the server refuses an unreadable one."""
    try:
        return float(json.loads(init_request)["init_info"]["timeout_s"])
    except (ValueError, KeyError, TypeError):
        return DEFAULT_PATIENCE_S
