"""The control plane of one rollout server, as the learner uses it: vLLM's own routes, with the token and a deadline."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from stage2_api.errors import shortened
from stage2_trainer.wire import calls, tls
from stage2_trainer.wire.address import host_and_port, is_loopback
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.served_model import POLICY_MODEL

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
    except ValueError as error:
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
            verify=tls.trust(base_url, os.environ) or True,
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

        The calls after one whose answer lacks what it demands are not made.

        Raises:
            ServerError: one of them failed, in its own phase; or the request did, in `phase`.
        """
        found = self.post(calls.ROUTE, phase, body=calls.to_text(made)).get("answers")
        if not isinstance(found, list) or not 0 < len(found) <= len(made):
            said = f"POST {calls.ROUTE} answered {shortened(found)} to {len(made)} calls"
            raise ServerError(self.base_url, phase, said)
        answers = []
        for call, answer in zip(made, found, strict=False):
            content = str(answer["content"]).encode()
            self._require_ok(int(answer["status"]), content, call.method, call.path, call.phase)
            answers.append(self._object(content, call.method, call.path, call.phase))
        return answers

    def post_for_list(
        self, path: str, phase: str, *, body: Mapping[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """POST a JSON object, and return the list of JSON objects that comes back. timeout_s: None = no limit."""
        content = self._request("POST", path, phase, timeout_s=timeout_s or math.inf, limit=MAX_LIST_BYTES, json=body)
        try:
            found = json.loads(content)
        except ValueError:
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
        """Let the server forget an adapter."""
        self._request("POST", "/v1/unload_lora_adapter", "unload adapter", json={"lora_name": name})

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
        told = tls.explained(error, self.base_url, os.environ)
        if told is None and isinstance(error, ENDED):
            told = tls.wants_tls(self.base_url)
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


def compressed(encoding: str) -> str:
    """Return what is wrong with an answer in an encoding."""
    return f"answered in the encoding {shortened(encoding)}, which was not asked for"


def too_long(limit: int) -> str:
    """Return what is wrong with an answer beyond a bound."""
    return f"answered more than {limit} bytes"
