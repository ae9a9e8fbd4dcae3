"""The ASGI middleware by which /health says that a server's workers are stuck in a weight update.

Every wait of a receiver ends: at once when the learner has gone, else at a deadline that the learner gave with the
group. A call of an update that goes on long after its learner has hung up is stuck in something that does not end, and
only a new start helps; until then the server would answer 200 and never take weights again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

from stage2_api.pod.ports import HEALTH_ROUTE
from stage2_trainer.engine.asgi import App, Receive, Scope, Send, answer, body_of

INIT_ROUTE = "/init_weight_transfer_engine"
UPDATE_ROUTES = frozenset({INIT_ROUTE, "/start_weight_update", "/update_weights", "/finish_weight_update"})
DEFAULT_PATIENCE_S = 480.0  # where no group was formed yet: twice the default of `vllm.server.timeout_s`
LOADING_S = 120.0  # to load what had arrived
STUCK = {"error": "a weight update that no learner waits for does not end; start this server again"}


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
            await asyncio.wait({call, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                self._left_alone[call] = time.monotonic()
            await call
        finally:
            self._left_alone.pop(call, None)
            hung_up.cancel()


def _patience(init_request: bytes) -> float:
    """Return the deadline of a receiver's waits, as the learner gives it; what cannot be read is refused elsewhere."""
    try:
        return float(json.loads(init_request)["init_info"]["timeout_s"])
    except (ValueError, KeyError, TypeError):
        return DEFAULT_PATIENCE_S
