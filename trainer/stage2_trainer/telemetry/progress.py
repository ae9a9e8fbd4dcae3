"""What the learner is doing: kept in one place, served at GET /progress, and left behind in the termination log.

Whoever holds the job's bearer token may ask; the controller copies the answer into the job's status.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self

from stage2_trainer.weights.sync_report import SyncReport

Phase = Literal["loading", "waiting-for-servers", "syncing", "rollout", "training", "done", "failed"]

ROUTE = "/progress"
TERMINATION_LOG_BYTES = 4096  # what the kubelet reads of it
MESSAGE_CHARS = 1000


@dataclass(frozen=True)
class Sync:
    """The last weight sync: `version` is the optimizer step whose weights the servers hold, -1 before the first."""

    requested_mode: str
    effective_mode: str
    version: int = -1
    seconds: float = 0.0
    servers: tuple[str, ...] = ()

    def after(self, report: SyncReport) -> Sync:
        """Return the state after a finished sync."""
        return replace(self, version=report.version, seconds=report.seconds, servers=report.servers)


@dataclass(frozen=True)
class Progress:
    """One state of the learner."""

    step: int = 0
    max_steps: int = 0
    phase: Phase = "loading"
    loss: float | None = None
    tokens_per_second: float | None = None
    sync: Sync | None = None
    reproducibility: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object that GET /progress answers with."""
        return {
            "step": self.step,
            "maxSteps": self.max_steps,
            "phase": self.phase,
            "loss": self.loss,
            "tokensPerSecond": self.tokens_per_second,
            "sync": None if self.sync is None else _sync_document(self.sync),
            "reproducibility": dict(self.reproducibility),
            "message": self.message[:MESSAGE_CHARS],
        }


class Reporter:
    """The learner's current progress; written by the training thread, read by the HTTP one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current = Progress()

    @property
    def current(self) -> Progress:
        """The latest state."""
        with self._lock:
            return self._current

    def update(self, **changes: Any) -> None:
        """Replace fields of the state, by the names of `Progress`."""
        with self._lock:
            self._current = replace(self._current, **changes)

    def write_termination_log(self, path: Path) -> None:
        """Leave the last state where Kubernetes picks it up, within the 4096 bytes that it reads."""
        document = self.current.document()
        text = json.dumps(document)
        if len(text.encode()) > TERMINATION_LOG_BYTES:
            text = json.dumps(document | {"reproducibility": {}})
        path.write_text(text, encoding="utf-8")


class ProgressServer:
    """Serves a reporter's state on a thread of its own, from `with` to the end of the block."""

    def __init__(self, reporter: Reporter, *, host: str, port: int, token: str) -> None:
        self._http = _Server((host, port), reporter, token)
        self._thread = threading.Thread(target=self._http.serve_forever, name="progress", daemon=True)

    @property
    def port(self) -> int:
        """The port in use (the one chosen by the system when 0 was asked for)."""
        return int(self._http.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], reporter: Reporter, token: str) -> None:
        super().__init__(address, _Handler)
        self.reporter = reporter
        self.authorization = f"Bearer {token}".encode()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer GET /progress to whoever has the token."""
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self.server.authorization):
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "the job's bearer token is needed"})
        elif self.path != ROUTE:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"only {ROUTE} is served here"})
        else:
            self._answer(HTTPStatus.OK, self.server.reporter.current.document())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the controller asks every few seconds."""

    def _answer(self, status: HTTPStatus, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _sync_document(sync: Sync) -> dict[str, Any]:
    return {
        "version": sync.version,
        "requestedMode": sync.requested_mode,
        "effectiveMode": sync.effective_mode,
        "seconds": sync.seconds,
        "servers": [{"baseUrl": url, "version": sync.version} for url in sync.servers],
    }
