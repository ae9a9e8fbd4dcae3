"""Whoever has not shown the token can take little of a server: bytes, connections, time, requests that wait."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn

from stage2_trainer.serve import bounded_http
from stage2_trainer.serve.bounded_http import BoundedConfig
from stage2_trainer.serve.guard import TokenGuard
from stage2_trainer.sync.vllm.vllm_compat import serve_with
from tests.support import certificates
from tests.support.patience import Patience, crowding

TOKEN = "a-token-of-some-length"
BEARER = f"Authorization: Bearer {TOKEN}\r\n".encode()
MANY_BYTES = 48 * 2**20  # more than both ends' kernels hold for a connection
FEW, REAL = 4, bounded_http.MOST_STRANGERS
AT_ONCE = 512  # requests of a learner
HELD = b"POST /held HTTP/1.1\r\nHost: h\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
CHUNKED = b"POST /held HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n"


class App:
    """Answers /health at once, and all else once `may_answer` is set; counts what it was asked."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked = 0

    async def __call__(self, scope, receive, send):
        self.asked += 1
        while scope["path"] != "/health" and not self.may_answer.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Served:
    """A server on a port; over TLS if there is a context to check it with."""

    def __init__(self, app: App, port: int, trusted: ssl.SSLContext | None) -> None:
        self.app, self.port, self._trusted = app, port, trusted

    def knock(self) -> socket.socket:
        """Connect, and say nothing."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def connect(self) -> socket.socket:
        return self.greet(self.knock())

    def greet(self, plain: socket.socket) -> socket.socket:
        return plain if self._trusted is None else self._trusted.wrap_socket(plain, server_hostname="localhost")

    def health(self) -> int:
        with contextlib.closing(self.connect()) as connection:
            connection.sendall(GET)
            return status(connection)


def status(connection: socket.socket) -> int:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


@pytest.fixture(params=["http", "https"])
def served(request, tmp_path, monkeypatch) -> Iterator[Served]:
    """A server as vLLM's and the stub's are, with few strangers."""
    monkeypatch.setattr(bounded_http, "MOST_STRANGERS", FEW)
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("STAGE2_TOKEN_FILE", str(tmp_path / "token"))
    files = certificates.make(tmp_path) if request.param == "https" else None
    tls = {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)} if files else {}
    app = App()
    config = BoundedConfig(TokenGuard(app), host="127.0.0.1", port=0, log_level="critical", lifespan="off", **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    patience = Patience(60)
    while not server.started and not patience.ended():
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(app, port, ssl.create_default_context(cafile=files.authority) if files else None)
    app.may_answer.set()
    server.should_exit = True
    thread.join()


def taken(connection: socket.socket, start: bytes, again: bytes) -> int:
    """Return how many bytes a server takes before it hangs up, of a start and of something that is sent repeatedly."""
    connection.sendall(start)
    count, part = len(start), again * (2**16 // len(again))
    with contextlib.suppress(OSError):
        while count < MANY_BYTES:
            connection.sendall(part)
            count += len(part)
    return count


def is_closed(connection: socket.socket) -> bool:
    """Wait until the server has closed a connection that it does not answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("token", [b"", BEARER], ids=["without the token", "with the token"])
@pytest.mark.parametrize(
    ("start", "again"),
    [
        (b"GET /", b"a"),
        (b"GET /?", b"a=b&"),
        (HELD, b"x: y\r\n"),
        (HELD + b"x: ", b"y"),
        (HELD, b"y"),
        (CHUNKED + b"\r\n0\r\n", b"x: y\r\n"),
        (CHUNKED + b"\r\n0\r\nx: ", b"y"),
        (CHUNKED + b"\r\n1;", b"a=b;"),
    ],
    ids=["path", "query", "headers", "value", "name", "trailers", "trailer", "extension"],
)
def test_endless_request_head_is_cut_off(served, start, again, token):
    start = start.replace(b"Host: h\r\n", b"Host: h\r\n" + token)
    with contextlib.closing(served.connect()) as connection:
        assert taken(connection, start, again) < MANY_BYTES
    assert served.health() == 200


def test_number_of_request_headers_is_limited(served):
    for count, found in [(bounded_http.MOST_HEADERS - 1, 401), (bounded_http.MOST_HEADERS, 400)]:
        with contextlib.closing(served.connect()) as connection:
            connection.sendall(HELD + b"x:\r\n" * count + b"\r\n")
            assert status(connection) == found


def test_number_of_queued_pipelined_requests_is_limited(served):
    with contextlib.closing(served.connect()) as connection:
        connection.sendall(HELD + BEARER + b"Content-Length: 0\r\n\r\n")
        with contextlib.suppress(OSError):  # it may hang up before it has all
            connection.sendall(GET * 2000)
            while connection.recv(65536):
                pass
    served.app.may_answer.set()
    assert served.health() == 200
    assert served.app.asked <= bounded_http.MOST_QUEUED + 2


def test_pipelined_requests_are_all_answered(served):
    with contextlib.closing(served.connect()) as connection:
        connection.sendall(GET * 3)
        with connection.makefile("rb") as heard:
            for _ in range(3):
                assert heard.readline() == b"HTTP/1.1 200 OK\r\n"
                while heard.readline() != b"\r\n":
                    pass


KINDS: list[Callable[[Served], socket.socket]] = [Served.knock, Served.connect]


@pytest.mark.parametrize("open_one", KINDS, ids=["before TLS", "after TLS"])
def test_too_many_unauthenticated_connections_close_oldest(served, open_one):
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(contextlib.closing(open_one(served))) for _ in range(3 * FEW)]
        assert all(is_closed(connection) for connection in waiting[: 2 * FEW])
        assert served.health() == 200  # and ends the next one
        for connection in waiting[2 * FEW + 1 :]:
            connection.setblocking(False)
            with pytest.raises((BlockingIOError, ssl.SSLWantReadError)):
                connection.recv(1)


def test_unauthenticated_connections_do_not_close_authenticated_ones(served, monkeypatch):
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(contextlib.closing(served.connect()))
        learner.sendall(HELD + BEARER + b"Content-Length: 4\r\n\r\n")
        patience = Patience(60)
        while not served.app.asked and not patience.ended():
            time.sleep(0.01)
        waiting = [stack.enter_context(contextlib.closing(served.knock())) for _ in range(3 * FEW)]
        assert all(is_closed(connection) for connection in waiting[: 2 * FEW])
        served.app.may_answer.set()
        learner.sendall(b"body")
        assert status(learner) == 200
        learner.sendall(GET)
        assert status(learner) == 200


def test_learner_that_opens_hundreds_of_connections_at_once_is_answered_on_each(served, monkeypatch):
    monkeypatch.setattr(bounded_http, "MOST_STRANGERS", REAL)
    served.app.may_answer.set()
    with contextlib.ExitStack() as stack:
        knocks = [stack.enter_context(contextlib.closing(served.knock())) for _ in range(AT_ONCE)]
        for connection in [served.greet(knock) for knock in knocks]:
            stack.enter_context(contextlib.closing(connection))
            connection.sendall(HELD + BEARER + b"Content-Length: 0\r\n\r\n")
            assert status(connection) == 200


SLOW = {
    "silent": (b"", b""),
    "head": (b"GET /hea", b"x"),
    "headers": (GET[:-2], b"x: y\r\n"),
    "body": (HELD + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "body of an open route": (GET[:-2] + b"Content-Length: 1000000\r\n\r\n", b"x"),
    "requests": (b"", GET),
}


@pytest.mark.parametrize("kind", SLOW)
def test_slow_unauthenticated_connection_is_cut_off(served, monkeypatch, kind):
    usual = bounded_http.LONGEST_S
    monkeypatch.setattr(bounded_http, "LONGEST_S", 1.0)  # by the clock: their requests never end
    start, again = SLOW[kind]
    patience = Patience(60)
    with contextlib.closing(served.connect()) as connection, contextlib.suppress(OSError):
        connection.sendall(start)
        connection.settimeout(0.1)  # by the clock: so often it sends more
        while not patience.ended():
            connection.sendall(again)
            with contextlib.suppress(TimeoutError):
                if connection.recv(65536) == b"":
                    break
    assert not patience.ended()
    monkeypatch.setattr(bounded_http, "LONGEST_S", usual)
    assert served.health() == 200


def test_half_open_handshake_is_cut_off(served, monkeypatch):
    monkeypatch.setattr(bounded_http, "LONGEST_S", 1.0)  # by the clock: their requests never end
    with contextlib.closing(served.knock()) as silent, contextlib.closing(served.knock()) as begun:
        begun.sendall(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello
        assert is_closed(silent)
        assert is_closed(begun) or begun.recv(65536)  # plain HTTP answers 400


def test_authenticated_connection_is_not_cut_off_by_time_limit(served, monkeypatch):
    monkeypatch.setattr(bounded_http, "LONGEST_S", 2.0 * crowding())
    with contextlib.closing(served.connect()) as learner:
        learner.sendall(HELD + BEARER + b"Content-Length: 0\r\n\r\n")
        with contextlib.closing(served.knock()) as silent:
            assert is_closed(silent), "the learner came before: its time is over as well"
        served.app.may_answer.set()
        assert status(learner) == 200


def test_ended_connections_are_forgotten(served):
    for _ in range(3):
        served.health()
        served.knock().close()
    holder = served.connect()
    with contextlib.closing(holder):
        holder.sendall(GET)
        assert status(holder) == 200


def test_vllm_uses_bounded_http_protocol(monkeypatch):
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)
    serve_with(BoundedConfig)
    config = uvicorn.Config(App(), port=0)
    config.load()
    assert config.http_protocol_class is bounded_http.BoundedProtocol
