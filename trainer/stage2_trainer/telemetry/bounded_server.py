"""Threads of the learner's small HTTP servers: so many at most, and none for long, whoever connects."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import sys
import threading
from http.server import HTTPServer
from typing import Any

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
