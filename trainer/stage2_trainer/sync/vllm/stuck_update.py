"""The ASGI middleware of the calls of a weight update: /health says where one is stuck, and a dead engine ends them.

Every wait of a receiver ends: at once when the learner has gone, else at a deadline that the learner gave with the
group. A call of an update that goes on long after its learner has hung up is stuck in something that does not end, and
only a new start helps; until then the server would answer 200 and never take weights again.

Where vLLM's engine process dies, its server closes the port and waits for the calls under way before it ends. Nobody
answers those that had gone to the engine: the server would be neither up nor restarted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_trainer.sync.vllm.asgi import App, Receive, Scope, Send, answer, body_of

INIT_ROUTE = "/init_weight_transfer_engine"
UPDATE_ROUTES = frozenset(
    {
        INIT_ROUTE,
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/resume",
    }
)
DEFAULT_PATIENCE_S = 480.0  # where no group was formed yet: twice the default of `vllm.server.timeout_s`
LOADING_S = 120.0  # to load what had arrived
ENGINE_CHECK_S = 1.0
STUCK = {"error": "a weight update that no learner waits for does not end; start this server again"}
DEAD = {"error": "the engine of this server has died; it must be started again"}


class StuckUpdate:
    """The middleware; the token guard stands before it, so no stranger's call is counted."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._patience_s = DEFAULT_PATIENCE_S
        self._left_alone: dict[object, float] = {}  # since when; calls whose learner has hung up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HEALTH_ROUTE and self._is_stuck():
            await answer(send, 503, STUCK)
        elif scope["type"] == "http" and scope["path"] in UPDATE_ROUTES:
            await self._watch(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_stuck(self) -> bool:
        limit_s = self._patience_s + LOADING_S
        return any(time.monotonic() - since > limit_s for since in self._left_alone.values())

    async def _watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a call, and note when the learner stops waiting for it."""
        body = await body_of(receive)
        if scope["path"] == INIT_ROUTE:
            self._patience_s = _patience(body)
        hung_up = asyncio.ensure_future(receive())
        messages = [{"type": "http.request", "body": body}]

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await asyncio.shield(hung_up)

        call = asyncio.ensure_future(self._app(scope, replay, send))
        try:
            if await self._ends(call, hung_up, scope):
                await call
            else:
                call.cancel()
                await answer(send, 503, DEAD)
        finally:
            self._left_alone.pop(call, None)
            hung_up.cancel()

    async def _ends(self, call: asyncio.Future[None], hung_up: asyncio.Future[Any], scope: Scope) -> bool:
        """Wait for a call; return whether it has ended, and not the engine that it waits for."""
        waited = {call, hung_up}
        while not call.done():
            ended, _ = await asyncio.wait(waited, timeout=ENGINE_CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            if hung_up in ended:
                self._left_alone[call] = time.monotonic()
                waited = {call}
            if not ended and _engine_is_dead(scope):
                return False
        return True


def _engine_is_dead(scope: Scope) -> bool:
    """Whether vLLM's engine process has ended; a stub has none."""
    state = getattr(scope.get("app"), "state", None)
    return bool(getattr(getattr(state, "engine_client", None), "errored", False))


def _patience(init_request: bytes) -> float:
    """Return the deadline of a receiver's waits, as the learner gives it; what cannot be read is refused elsewhere."""
    try:
        return float(json.loads(init_request)["init_info"]["timeout_s"])
    except (ValueError, KeyError, TypeError):
        return DEFAULT_PATIENCE_S
