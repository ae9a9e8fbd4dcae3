"""The learner's state: kept in one place, served at GET /progress, and left behind in the termination log.

Whoever holds the job's bearer token may ask; the controller copies the answer into the job's status.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import socketserver
import ssl
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from stage2_api.pod.layout import PROGRESS_ROUTE
from stage2_api.pod.report import LearnerPhase, LearnerReport, ReportedSync, termination_message

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
"""Seconds of a connection, from its first byte to the end of the answer."""


class BoundedHTTPServer(socketserver.ThreadingMixIn, HTTPServer):
    """An HTTP server with a thread for each connection: those beyond the bound are closed at once, slow ones later.

    Whoever reaches the port may open connections and say nothing: each would be a thread of the training process.
    """

    daemon_threads = True

    def __init__(self, *arguments: Any, tls: ssl.SSLContext | None = None, **options: Any) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._tls = tls
        super().__init__(*arguments, **options)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; the first read shakes hands, in the thread that answers."""
        request, address = super().get_request()
        if self._tls is not None:
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave whoever ends a connection, or speaks no TLS, to itself; a bug is told with its traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or not at all."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer within the time that a connection has."""
        limit = threading.Timer(LONGEST_S, _end, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()


def _end(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        request.shutdown(socket.SHUT_RDWR)


class ReportChanges(TypedDict, total=False):
    """Fields of the report that change, by the names of `LearnerReport`."""

    step: int
    max_steps: int
    phase: LearnerPhase
    loss: float | None
    tokens_per_second: float | None
    best_step: int | None
    best_score: float | None
    sync: ReportedSync
    reproducibility: Mapping[str, Any]
    message: str


class Reporter:
    """The learner's current progress; written by the training thread, read by the HTTP one."""

    def __init__(self, *, restarts: int = 0) -> None:
        self._lock = threading.Lock()
        self._current = LearnerReport(phase="loading", restarts=restarts)

    @property
    def current(self) -> LearnerReport:
        """The latest state."""
        with self._lock:
            return self._current

    def update(self, **changes: Unpack[ReportChanges]) -> None:
        """Replace fields of the state."""
        with self._lock:
            self._current = self._current.model_copy(update=changes)

    def write_termination_log(self, path: Path) -> None:
        """Leave the last state where Kubernetes picks it up."""
        path.write_text(termination_message(self.current), encoding="utf-8")


class ProgressServer:
    """A server of a reporter's state on a thread of its own, from `with` to the end of the block.

    tls: with what it answers over TLS; None: plain HTTP.
    """

    def __init__(
        self, reporter: Reporter, *, host: str, port: int, token: str, tls: ssl.SSLContext | None = None
    ) -> None:
        self._http = _Server((host, port), reporter, token, tls)
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


class _Server(BoundedHTTPServer):
    def __init__(self, address: tuple[str, int], reporter: Reporter, token: str, tls: ssl.SSLContext | None) -> None:
        super().__init__(address, _Handler, tls=tls)
        self.reporter = reporter
        self.authorization = f"Bearer {token}".encode()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer GET /progress to whoever has the token."""
        given = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self.server.authorization):
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "the job's bearer token is needed"})
        elif self.path != PROGRESS_ROUTE:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"only {PROGRESS_ROUTE} is served here"})
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
