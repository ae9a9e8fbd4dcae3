"""The learner's state: held by a reporter, served at GET /progress, and left in the termination log.

Whoever has the job's bearer token may ask; the controller copies the answer into the job's status.
"""

from __future__ import annotations

import contextlib
import hmac
import io
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
from socketserver import StreamRequestHandler
from typing import Any, Self, TypedDict, Unpack

from stage2_api.pod.layout import PROGRESS_ROUTE
from stage2_api.pod.report import LearnerPhase, LearnerReport, SyncStatus, termination_message

MOST_CONNECTIONS = 32
LONGEST_S = 10.0
"""Seconds of a connection, from its first byte to the end of the answer."""
MOST_BYTES = 2**16
"""Of a request: what follows is not read."""


class ReportChanges(TypedDict, total=False):
    """Changed fields of the report, by the names of `LearnerReport`."""

    step: int
    max_steps: int
    resumed_step: int
    phase: LearnerPhase
    loss: float | None
    tokens_per_second: float | None
    best_step: int | None
    best_score: float | None
    sync: SyncStatus
    reproducibility: Mapping[str, Any]
    message: str


class Reporter:
    """The learner's current progress, written by the training thread and read by the HTTP one."""

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
        """Write the last state to where Kubernetes reads it."""
        path.write_text(termination_message(self.current), encoding="utf-8")


class BoundedHTTPServer(socketserver.ThreadingMixIn, HTTPServer):
    """An HTTP server that runs within a `with` block, with a thread for each connection.

    Anybody who reaches the port may open connections and send nothing, and each would be a thread of the training
    process. So slow ones are closed after `LONGEST_S`, and one more than MOST_CONNECTIONS closes the oldest: if it were
    refused, whoever holds that many would keep the controller out. tls: None is plain HTTP.
    """

    daemon_threads = True
    request_queue_size = 1024  # connections that the kernel holds until they are accepted

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._oldest_first: dict[socket.socket, None] = {}
        self._changing = threading.Lock()
        self._tls = tls
        self._thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        super().__init__(address, type(handler.__name__, (_BoundedReader, handler), {}))

    @property
    def port(self) -> int:
        """The port in use (chosen by the system if 0 was requested)."""
        return int(self.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; the TLS handshake follows at the first read, in the connection's thread."""
        request, address = super().get_request()
        if self._tls is not None:
            request = self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or do not speak TLS; print the traceback of a bug."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; close the oldest connection if there are too many."""
        with self._changing:
            self._oldest_first[request] = None
            if len(self._oldest_first) > MOST_CONNECTIONS:
                oldest = next(iter(self._oldest_first))
                del self._oldest_first[oldest]
                _close(oldest)
        if self._free.acquire(timeout=LONGEST_S):  # which its thread does
            super().process_request(request, client_address)
        else:
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and close the connection after `LONGEST_S`."""
        limit = threading.Timer(LONGEST_S, _close, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._forget(request)
            self._free.release()

    def _forget(self, request: socket.socket) -> None:
        with self._changing:
            self._oldest_first.pop(request, None)


class _BoundedReader(StreamRequestHandler):
    """Of a handler: the first MOST_BYTES of its connection. http.server reads up to a hundred headers of 64 KiB."""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_FirstBytes(self.connection))


class _FirstBytes(io.RawIOBase):
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: self._left]
        count = self._connection.recv_into(view) if view.nbytes else 0
        self._left -= count
        return count


def _close(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        # Not SSLSocket's own method: it would let a call under way continue without TLS.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


class ProgressServer(BoundedHTTPServer):
    """Serves a reporter's state to whoever has the token."""

    def __init__(
        self, reporter: Reporter, *, host: str, port: int, token: str, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__((host, port), _Handler, name="progress", tls=tls)
        self.reporter = reporter
        self.authorization = f"Bearer {token}".encode()


class _Handler(BaseHTTPRequestHandler):
    server: ProgressServer

    def do_GET(self) -> None:
        """Answer GET /progress to whoever has the token."""
        credentials = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(credentials, self.server.authorization):
            self._answer(HTTPStatus.UNAUTHORIZED, {"error": "the job's bearer token is needed"})
        elif self.path != PROGRESS_ROUTE:
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"only {PROGRESS_ROUTE} is served here"})
        else:
            self._answer(HTTPStatus.OK, self.server.reporter.current.document())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the controller asks every few seconds."""

    def _answer(self, status: HTTPStatus, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
