"""An HTTP server of a test, in a thread."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class AnsweringHandler(QuietHandler):
    """Answers as `server.answer(path, body)` says: with a status, and with bytes or a JSON document."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        status, found = self.server.answer(self.path, body)
        content = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """A server whose clients may hang up at any time."""

    answer: Callable[[str, Any], tuple[int, Any]]
    tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, over TLS where the server has a certificate."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        with self.tls.wrap_socket(request, server_side=True) as over_tls:
            super().finish_request(over_tls, client_address)

    def handle_error(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Server]:
    """Answer requests on a port of this machine, each in a thread, until the block ends."""
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def answering(answer: Callable[[str, Any], tuple[int, Any]]) -> Iterator[Server]:
    """Answer each request as `answer(path, body)` says, until the block ends."""
    with serving(AnsweringHandler) as server:
        server.answer = answer
        yield server
