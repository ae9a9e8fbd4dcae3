"""The control plane of one rollout server, as the learner uses it: vLLM's own routes, with the token and a deadline."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import httpx

from stage2_api.errors import shortened
from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_trainer.wire import calls, credentials
from stage2_trainer.wire.background import all_at_once
from stage2_trainer.wire.errors import ServerError, join_errors
from stage2_trainer.wire.names import POLICY_MODEL, host_and_port, is_loopback

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
TOLD_EVERY_S = 30.0
ServerProtocol = Literal["vllm", "swift"]
HEALTH_ROUTES: dict[ServerProtocol, str] = {"vllm": HEALTH_ROUTE, "swift": f"{HEALTH_ROUTE}/"}


def wait_until_healthy(
    base_urls: Sequence[str], token: str, *, timeout_s: float, protocol: ServerProtocol = "vllm"
) -> None:
    """Return once every server answers its health route, and takes the token.

    Raises:
        ServerError: a server did not answer within `timeout_s` seconds (counted once for all), or refuses the token.
    """
    logger.info("waiting for servers, at most %g s: %s", timeout_s, ", ".join(base_urls))
    with ExitStack() as stack:
        clients = [ServerClient(url, token, timeout_s=HEALTH_TIMEOUT_S) for url in base_urls]
        for client in clients:
            stack.callback(client.close)
        _wait(clients, timeout_s, HEALTH_ROUTES[protocol])
        all_at_once(_tell_of_workers if protocol == "swift" else _tell_of_version, clients)


def wait_for_ever(base_urls: Sequence[str], token: str, *, protocol: ServerProtocol = "vllm") -> None:
    """Return once every server answers its health route; until then, log now and then who does not, and how."""
    logger.info("waiting for servers: %s", ", ".join(base_urls))
    with ExitStack() as stack:
        clients = [ServerClient(url, token, timeout_s=HEALTH_TIMEOUT_S) for url in base_urls]
        for client in clients:
            stack.callback(client.close)
        told = time.monotonic()
        while failures := [failure for _, failure in _failing(clients, HEALTH_ROUTES[protocol])]:
            if time.monotonic() - told >= TOLD_EVERY_S:
                told = time.monotonic()
                logger.info(
                    "%d of %d servers do not answer yet: %s", len(failures), len(clients), join_errors(failures)
                )
            time.sleep(POLL_INTERVAL_S)
    logger.info("all %d servers answer", len(base_urls))


def _wait(clients: Sequence[ServerClient], timeout_s: float, route: str) -> None:
    deadline = time.monotonic() + timeout_s
    waiting = list(clients)
    while failures := _failing(waiting, route):
        if time.monotonic() > deadline:
            raise join_errors(
                [
                    ServerError(client.base_url, "health", f"not healthy within {timeout_s:g} s: {failure.detail}")
                    for client, failure in failures
                ]
            )
        waiting = [client for client, _ in failures]
        time.sleep(POLL_INTERVAL_S)


def _failing(clients: Sequence[ServerClient], route: str) -> list[tuple[ServerClient, ServerError]]:
    """Ask all at once: one that stands still takes the whole time limit of a call."""

    def failure(client: ServerClient) -> ServerError | None:
        try:
            client.get(route, "health")
        except ServerError as error:
            return error
        return None

    found = zip(clients, all_at_once(failure, clients), strict=True)
    return [(client, error) for client, error in found if error is not None]


def _tell_of_workers(client: ServerClient) -> None:
    workers = client.get("/get_world_size/", "health")["world_size"]
    logger.info("server %s is healthy, %d workers", client.base_url, workers)


def _tell_of_version(client: ServerClient) -> None:
    logger.info("server %s is healthy, weight version %s", client.base_url, client.weight_version())


MAX_ERROR_CHARS = 600
MAX_ANSWER_BYTES = 64 << 20
"""An answer of 32,000 tokens with their log-probabilities has a tenth of it; more is refused unread."""
MAX_LIST_BYTES = 8 * MAX_ANSWER_BYTES
NOT_COMPRESSED = {"Accept-Encoding": "identity"}
"""Few bytes of what is compressed stand for any number, and bounds are on what travels."""
OF_JSON = {"Content-Type": "application/json"}
CONNECT_TIMEOUT_S = 10.0
ENDED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)  # what one that wants TLS does to plain HTTP


def token_header(token: str) -> dict[str, str]:
    """Return the header by which a caller proves the job's token."""
    return {"Authorization": f"Bearer {token}"}


def trusts_proxies(base_url: str) -> bool:
    """Whether the environment's proxies are used for a server: not for one on this machine or in this cluster."""
    host, _ = host_and_port(base_url)
    return not is_loopback(host) and not host.endswith((".svc", ".svc.cluster.local"))


def describe_http_error(error: httpx.HTTPError) -> str:
    """Say what went wrong on the way to or from a server."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer in time ({type(error).__name__})"
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


class ServerClient:
    """Blocking calls to one server. Thread-safe.

    Every call names its phase, and raises `ServerError` when the server answers anything but 200, cannot be reached, or
    does not answer within the call's deadline (seconds; default `timeout_s`).

    Raises:
        ConfigError: at construction, when the certificates to check a server of https:// by cannot be read.
    """

    def __init__(self, base_url: str, token: str, *, timeout_s: float) -> None:
        self.base_url = base_url
        self.timeout_s = timeout_s
        # A new connection for each call: a server closes one that it has answered 500 on, and the call that reuses it
        # in that moment would be lost.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(
            base_url=base_url,
            headers=token_header(token) | NOT_COMPRESSED,
            trust_env=trusts_proxies(base_url),
            verify=credentials.trust(base_url, os.environ) or True,
            limits=limits,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, phase: str) -> dict[str, Any]:
        """GET a JSON object ({} for an empty answer)."""
        return self._call("GET", path, phase)

    def post(
        self,
        path: str,
        phase: str,
        *,
        body: Mapping[str, Any] | str | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """POST a JSON object, or its text, and return the JSON object that comes back ({} for an empty answer)."""
        sent = {"content": body, "headers": OF_JSON} if isinstance(body, str) else {"json": body}
        return self._call("POST", path, phase, timeout_s=timeout_s, params=query, **sent)

    def in_order(self, phase: str, made: Sequence[calls.Call]) -> list[dict[str, Any]]:
        """Let the server make calls of its own routes, in order, in one request; returns the answers of those made.

        The calls after one whose answer lacks what it demands are not made. Each may take `timeout_s`.

        Raises:
            ServerError: one of them failed, or was not answered, in its own phase; or the request was, in `phase`.
        """
        answers: list[dict[str, Any]] = []
        timeout = httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_TIMEOUT_S))
        text, began = calls.calls_to_json(made), False
        try:
            with self._http.stream(
                "POST", calls.CALLS_ROUTE, timeout=timeout, content=text, headers=OF_JSON
            ) as response:
                if response.status_code != httpx.codes.OK:
                    self._refuse_calls(response, phase)
                began = True
                for line in _lines(response, timeout_s=self.timeout_s, most=len(made)):
                    answers.append(self._answered(made[: len(answers) + 1], line))
        except (httpx.HTTPError, ValueError) as error:
            said = self._described(error)
            if began and len(answers) < len(made):
                call = made[len(answers)]
                raise ServerError(self.base_url, call.phase, f"{call.method} {call.path}: {said}") from error
            raise ServerError(self.base_url, phase, f"POST {calls.CALLS_ROUTE}: {said}") from error
        return self._all_of(made, answers)

    def _refuse_calls(self, response: httpx.Response, phase: str) -> None:
        content = _content(response, MAX_ANSWER_BYTES, timeout_s=self.timeout_s)
        if response.status_code == httpx.codes.NOT_FOUND:
            other = f"POST {calls.CALLS_ROUTE} answered 404: learner and server must have the same version of stage2"
            raise ServerError(self.base_url, phase, other)
        self._require_ok(response.status_code, content, "POST", calls.CALLS_ROUTE, phase)

    def _answered(self, made: Sequence[calls.Call], line: bytes) -> dict[str, Any]:
        """Return what the last of these calls was answered."""
        call = made[-1]
        found = calls.CallAnswer.from_wire(read_object(line))
        content = found.content.encode(errors="replace")
        self._require_ok(found.status, content, call.method, call.path, call.phase)
        return self._object(content, call.method, call.path, call.phase)

    def _all_of(self, made: Sequence[calls.Call], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answers, if they end where they should: with the last call, or the first of an unmet demand."""
        unmet = (i for i, one in enumerate(answers) if not calls.is_met(made[i].demand, one))
        should = next(unmet, len(made) - 1) + 1
        if len(answers) != should:
            call = made[max(min(len(answers), should) - 1, 0)]
            detail = f"POST {calls.CALLS_ROUTE} made {len(answers)} of {len(made)} calls, and should have made {should}"
            raise ServerError(self.base_url, call.phase, detail)
        return answers

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
        """Let the server forget an adapter, unless it has forgotten that already."""
        try:
            self._request("POST", "/v1/unload_lora_adapter", "unload adapter", json={"lora_name": name})
        except ServerError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise

    def _call(
        self, method: str, path: str, phase: str, *, timeout_s: float | None = None, **options: Any
    ) -> dict[str, Any]:
        return self._object(self._request(method, path, phase, timeout_s=timeout_s, **options), method, path, phase)

    def _object(self, content: bytes, method: str, path: str, phase: str) -> dict[str, Any]:
        try:
            return read_object(content)
        except ValueError as error:
            raise ServerError(self.base_url, phase, f"{method} {path} {error}") from error

    def _value(self, path: str, phase: str, key: str) -> Any:
        found = self.get(path, phase)
        if key not in found:
            raise ServerError(self.base_url, phase, f"GET {path} answered {shortened(found)}, without {key}")
        return found[key]

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
        timeout = httpx.Timeout(None if seconds == math.inf else seconds, connect=min(seconds, CONNECT_TIMEOUT_S))
        try:
            with self._http.stream(method, path, timeout=timeout, **options) as response:
                content = _content(response, limit, timeout_s=self.timeout_s)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(self.base_url, phase, f"{method} {path}: {self._described(error)}") from error
        self._require_ok(response.status_code, content, method, path, phase)
        return content

    def _require_ok(self, status: int, content: bytes, method: str, path: str, phase: str) -> None:
        if status != httpx.codes.OK:
            said = content[: 4 * MAX_ERROR_CHARS].decode(errors="replace")[:MAX_ERROR_CHARS]
            gone = status == httpx.codes.SERVICE_UNAVAILABLE
            detail = f"{method} {path} answered {status}: {said}"
            raise ServerError(self.base_url, phase, detail, status=None if gone else status)

    def _described(self, error: httpx.HTTPError | ValueError) -> str:
        if not isinstance(error, httpx.HTTPError):
            return str(error)
        told = credentials.explain_tls_error(error, self.base_url, os.environ)
        if told is None and isinstance(error, ENDED):
            told = credentials.explain_hang_up(self.base_url)
        return told or describe_http_error(error)


def _content(response: httpx.Response, limit: int, *, timeout_s: float) -> bytes:
    """Return what a server answers.

    Raises ValueError for more than `limit` bytes, for what is compressed, or takes longer than `timeout_s` seconds from
    its beginning: httpx bounds the time between two bytes alone.
    """
    deadline = time.monotonic() + timeout_s
    if encoding := response.headers.get("Content-Encoding"):
        raise ValueError(compressed(encoding))
    content = bytearray()
    for part in response.iter_raw():
        content += part
        if len(content) > limit:
            raise ValueError(too_long(limit))
        if time.monotonic() > deadline:
            raise ValueError(f"no answer in time: it has begun, and {timeout_s:g} s later it still comes")
    return bytes(content)


def _lines(response: httpx.Response, *, timeout_s: float, most: int) -> Iterator[bytes]:
    """Yield the lines of an answer as they come; httpx bounds the time until there is more.

    Raises ValueError for more than `most` lines, for more bytes than an answer has, for what is compressed, and for a
    line that takes longer than `timeout_s` seconds.
    """
    if encoding := response.headers.get("Content-Encoding"):
        raise ValueError(compressed(encoding))
    kept, size, lines, deadline = bytearray(), 0, 0, time.monotonic() + timeout_s
    for part in response.iter_raw():
        kept, size = kept + part, size + len(part)
        *whole, rest = kept.split(b"\n")
        lines += len(whole)
        if size > MAX_ANSWER_BYTES or lines > most:
            raise ValueError(too_long(MAX_ANSWER_BYTES) if lines <= most else f"answered more than {most} lines")
        if whole:
            yield from map(bytes, whole)
            kept, deadline = bytearray(rest), time.monotonic() + timeout_s
        elif time.monotonic() > deadline:
            raise ValueError(f"no answer in time: it has begun, and {timeout_s:g} s later it still comes")
    if kept:
        raise ValueError("the answer breaks off")


def compressed(encoding: str) -> str:
    """Return what is wrong with an answer in an encoding."""
    return f"answered in the encoding {shortened(encoding)}, which was not asked for"


def too_long(limit: int) -> str:
    """Return what is wrong with an answer beyond a bound."""
    return f"answered more than {limit} bytes"
