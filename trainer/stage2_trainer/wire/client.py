"""The learner's blocking calls to one rollout server, and the wait until all servers answer.

The calls are vLLM's own routes, each with the token, and with a deadline from its connection to the end of its answer.
Each call has a connection of its own: a server closes one on which it has answered 500, and a call that reused it in
that moment would be lost.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import aiohttp

from stage2_api.errors import shortened
from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.background import all_at_once
from stage2_trainer.wire import credentials
from stage2_trainer.wire.credentials import host_and_port, is_loopback
from stage2_trainer.wire.errors import ServerError, join_errors
from stage2_trainer.wire.keep_alive import keep_alive_socket
from stage2_trainer.wire.requests import POLICY_MODEL

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
ServerProtocol = Literal["vllm", "swift"]
HEALTH_ROUTES: dict[ServerProtocol, str] = {"vllm": HEALTH_ROUTE, "swift": f"{HEALTH_ROUTE}/"}

MAX_ERROR_CHARS = 600
MAX_ANSWER_BYTES = 64 << 20
"""An answer of 32,000 tokens with their log-probabilities takes a tenth of it; larger answers are refused."""
MAX_LIST_BYTES = 8 * MAX_ANSWER_BYTES
NOT_COMPRESSED = {"Accept-Encoding": "identity"}
"""A few compressed bytes can expand to any number, and the limits apply to the bytes that travel."""
JSON_TYPE = {"Content-Type": "application/json"}
CONNECT_TIMEOUT_S = 10.0
FAILED_CALL = (aiohttp.ClientError, TimeoutError, OSError)
# What happens to a plain HTTP request at a server that answers over TLS alone.
HUNG_UP = (aiohttp.ServerDisconnectedError, aiohttp.ClientResponseError, aiohttp.ClientOSError)


class ServerClient:
    """Blocking calls to one server. Thread-safe; not for threads that run an event loop.

    Every call names its phase, and raises `ServerError` when the server answers anything but 200, cannot be reached, or
    does not answer within the call's deadline (seconds; default `timeout_s`).

    Raises:
        ConfigError: at construction, when the certificates that check a server of https:// cannot be read.
    """

    def __init__(self, base_url: str, token: str, *, timeout_s: float) -> None:
        self.base_url = base_url
        self.timeout_s = timeout_s
        self._token = token
        self._tls = credentials.trust(base_url, os.environ) or True

    def get(self, path: str, phase: str) -> dict[str, Any]:
        """GET a JSON object ({} for an empty answer)."""
        return self._call("GET", path, phase)

    def post(
        self, path: str, phase: str, *, body: Mapping[str, Any] | str | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """POST a JSON object, or its text, and return the JSON object that comes back ({} for an empty answer)."""
        sent = {"data": body, "headers": JSON_TYPE} if isinstance(body, str) else {"json": body}
        return self._call("POST", path, phase, timeout_s=timeout_s, **sent)

    def post_for_list(
        self, path: str, phase: str, *, body: Mapping[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """POST a JSON object, and return the list of JSON objects that comes back. timeout_s: None = no limit."""
        content = self._request("POST", path, phase, timeout_s=timeout_s or math.inf, limit=MAX_LIST_BYTES, json=body)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = content[:MAX_ERROR_CHARS].decode(errors="replace")
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise ServerError(self.base_url, phase, f"POST {path} answered {shortened(found)} instead of a list")
        return found

    def world_size(self) -> int:
        """Return the number of the server's workers (tensor times pipeline times data parallel)."""
        return int(self._value("/get_world_size", "connect", "world_size"))

    def weight_version(self) -> str:
        """Return the version that the last finished update stamped; "default" before the first."""
        return str(self._value("/weight_info", "version", "weight_version"))

    def adapters(self) -> list[str]:
        """Return the names of the adapters that the server serves beside the policy."""
        served = self._value("/v1/models", "list adapters", "data")
        return [str(model["id"]) for model in served if model["id"] != POLICY_MODEL]

    def unload_adapter(self, name: str) -> None:
        """Make the server forget an adapter, unless it has forgotten it already."""
        try:
            self._request("POST", "/v1/unload_lora_adapter", "unload adapter", json={"lora_name": name})
        except ServerError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise

    def _value(self, path: str, phase: str, key: str) -> Any:
        found = self.get(path, phase)
        if key not in found:
            raise ServerError(self.base_url, phase, f"GET {path} answered {shortened(found)}, without {key}")
        return found[key]

    def _call(self, method: str, path: str, phase: str, **options: Any) -> dict[str, Any]:
        content = self._request(method, path, phase, **options)
        try:
            return read_object(content)
        except ValueError as error:
            raise ServerError(self.base_url, phase, f"{method} {path} {error}") from error

    def _request(
        self,
        method: str,
        path: str,
        phase: str,
        *,
        timeout_s: float | None = None,
        limit: int = MAX_ANSWER_BYTES,
        **options: Any,
    ) -> bytes:
        seconds = self.timeout_s if timeout_s is None else timeout_s

        async def call() -> tuple[int, bytes]:
            to_connect = aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S)
            async with (
                asyncio.timeout(None if seconds == math.inf else seconds),
                open_session(self.base_url, self._token, ssl=self._tls, force_close=True) as session,
                session.request(
                    method, f"{self.base_url}{path}", allow_redirects=False, timeout=to_connect, **options
                ) as response,
            ):
                return response.status, await read_content(response, limit, timeout_s=self.timeout_s)

        try:
            status, content = asyncio.run(call())
        except (*FAILED_CALL, ValueError) as error:
            reason = explain_failure(error, self.base_url)
            raise ServerError(self.base_url, phase, f"{method} {path}: {reason}") from error
        if status != HTTPStatus.OK:
            gone = status == HTTPStatus.SERVICE_UNAVAILABLE
            detail = f"{method} {path} {describe_refusal(status, content)}"
            raise ServerError(self.base_url, phase, detail, status=None if gone else status)
        return content


def wait_until_healthy(
    base_urls: Sequence[str],
    token: str,
    *,
    timeout_s: float | None = None,
    some_after_s: float | None = None,
    protocol: ServerProtocol = "vllm",
) -> list[str]:
    """Return the servers once all of them answer the health route; the process's activity has those that do not.

    timeout_s: counted once for all servers, which must accept the token then; None = wait for as long as it takes.
    some_after_s: seconds after which those that answer are returned, if there are any; None = never.

    Raises:
        ServerError: a server did not answer in time, or refuses the token.
    """
    logger.info("waiting for servers%s: %s", f", at most {timeout_s:g} s" if timeout_s else "", ", ".join(base_urls))
    waiting = clients = [ServerClient(url, token, timeout_s=HEALTH_TIMEOUT_S) for url in base_urls]
    start = time.monotonic()
    with ACTIVITY.doing("waiting for servers") as doing:
        while failures := _failing(waiting, HEALTH_ROUTES[protocol]):
            waiting, errors = [client for client, _ in failures], [error for _, error in failures]
            silent = f"{len(waiting)} of {len(clients)} servers do not answer: {join_errors(errors)}"
            if some_after_s is not None and time.monotonic() >= start + some_after_s and len(waiting) < len(clients):
                logger.warning("continuing, although %s", silent)
                break
            if timeout_s is not None and time.monotonic() > start + timeout_s:
                late = f"not healthy within {timeout_s:g} s"
                raise join_errors([ServerError(error.server, "health", f"{late}: {error.detail}") for error in errors])
            doing.what = f"waiting for servers: {silent}"
            time.sleep(POLL_INTERVAL_S)
    there = [client for client in clients if not failures or client not in waiting]
    if timeout_s is not None:
        all_at_once(_log_workers if protocol == "swift" else _log_version, there)
    return [client.base_url for client in there]


def open_session(base_url: str, token: str, **connections: Any) -> aiohttp.ClientSession:
    """Return a session for calls of one server with the job's token. connections: options of aiohttp's TCPConnector."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}", **NOT_COMPRESSED},
        auto_decompress=False,
        trust_env=trusts_proxies(base_url),
        connector=aiohttp.TCPConnector(socket_factory=keep_alive_socket, **connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=MAX_ANSWER_BYTES // 2,  # aiohttp reads lines of up to twice that
    )


def describe_refusal(status: int, content: bytes) -> str:
    """Return the status of an answer, and the beginning of its text."""
    return f"answered {status}: {content[: 4 * MAX_ERROR_CHARS].decode(errors='replace')[:MAX_ERROR_CHARS]}"


def trusts_proxies(base_url: str) -> bool:
    """Whether the environment's proxies are used for a server: not for one on this machine or in this cluster."""
    host, _ = host_and_port(base_url)
    return not is_loopback(host) and not host.endswith((".svc", ".svc.cluster.local"))


def explain_failure(error: BaseException, base_url: str) -> str:
    """Return what went wrong on the way to or from a server, with the way out if it is about TLS."""
    reason = credentials.explain_tls_error(error, base_url, os.environ)
    if reason is None and isinstance(error, HUNG_UP):
        reason = credentials.explain_hang_up(base_url)
    if reason is not None:
        return reason
    if isinstance(error, TimeoutError):
        return f"no answer in time ({type(error).__name__})"
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def read_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object of an answer, {} of an empty one. Raise ValueError for anything else: a proxy's page."""
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"answered {shortened(content.decode(errors='replace'))} instead of JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"answered {shortened(found)} instead of a JSON object")
    return found


async def read_content(response: aiohttp.ClientResponse, limit: int, *, timeout_s: float) -> bytes:
    """Return the body of an answer.

    Raises:
        TimeoutError: it takes longer than `timeout_s` seconds from its beginning.
        ValueError: it has more than `limit` bytes, or is compressed.
    """
    if encoding := response.headers.get("Content-Encoding"):
        raise ValueError(f"answered in the encoding {shortened(encoding)}, which was not requested")
    content = bytearray()
    async with asyncio.timeout(timeout_s):
        async for part in response.content.iter_any():
            content += part
            if len(content) > limit:
                raise ValueError(f"answered more than {limit} bytes")
    return bytes(content)


def _failing(clients: Sequence[ServerClient], route: str) -> list[tuple[ServerClient, ServerError]]:
    """Check all servers at once, since one that hangs takes the whole time limit of a call."""

    def failure(client: ServerClient) -> ServerError | None:
        try:
            client.get(route, "health")
        except ServerError as error:
            return error
        return None

    found = zip(clients, all_at_once(failure, clients), strict=True)
    return [(client, error) for client, error in found if error is not None]


def _log_workers(client: ServerClient) -> None:
    workers = client.get("/get_world_size/", "health")["world_size"]
    logger.info("server %s is healthy, %d workers", client.base_url, workers)


def _log_version(client: ServerClient) -> None:
    logger.info("server %s is healthy, weight version %s", client.base_url, client.weight_version())
