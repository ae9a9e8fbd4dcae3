"""The ASGI middleware that demands the bearer token on every route but /health.

vLLM's own `--api-key` guards the /v1 routes only: its weight-update routes would stay open to whoever reaches the port.
vLLM loads this class by name (`--middleware stage2_trainer.serve.guard.TokenGuard`); the stub adds it to its own app.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from http import HTTPStatus

from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_trainer.sync.vllm.routes import App, Receive, Scope, Send, send_json
from stage2_trainer.wire.credentials import read_token

OPEN_PATHS = frozenset({HEALTH_ROUTE})
WELCOME = "stage2.welcome"
"""In a request's `state`: what to call once its connection has shown the token (`serve.bounded_http`)."""
POLICY_VIOLATION = 1008  # RFC 6455, section 7.4.1: closes a websocket that was not accepted with HTTP 403


class TokenGuard:
    """A middleware that answers 401 to a request without `Authorization: Bearer <token>`, and closes such a websocket.

    Raises:
        ConfigError: at construction, when STAGE2_TOKEN_FILE gives no token: an unguarded server never starts.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {read_token(os.environ)}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_authorized := scope["type"] != "lifespan" and self._is_authorized(scope["headers"]):
            scope.get("state", {}).get(WELCOME, _nobody_counts)()
        if is_authorized or scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            error = {"error": "a bearer token is required on every route but /health"}
            await send_json(send, HTTPStatus.UNAUTHORIZED, error, (b"www-authenticate", b"Bearer"))

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return scope["type"] == "http" and scope["path"] in OPEN_PATHS

    def _is_authorized(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        return len(given) == 1 and secrets.compare_digest(given[0], self._expected)


def _nobody_counts() -> None:
    """Do nothing: this app is served without bounds on connections."""
