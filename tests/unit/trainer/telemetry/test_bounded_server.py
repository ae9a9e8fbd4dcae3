"""Whoever opens connections and says nothing takes few threads, and those for a while."""

import contextlib
import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler

import pytest
from prometheus_client import CollectorRegistry, MetricsHandler

from stage2_trainer.telemetry import progress
from stage2_trainer.telemetry.progress import BoundedHTTPServer, ProgressServer, Reporter


class Handler(BaseHTTPRequestHandler):
    """Answers with nothing."""

    def do_GET(self):
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(progress, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(progress, "LONGEST_S", 0.5)
    with BoundedHTTPServer(("127.0.0.1", 0), Handler, name="bounded") as server:
        yield server.server_address


def answered(address):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/", timeout=20) as answer:
            return answer.status == 204
    except (urllib.error.URLError, ConnectionError, http.client.HTTPException):
        return False


def progress_server(stack):
    return stack.enter_context(ProgressServer(Reporter(), host="127.0.0.1", port=0, token="secret")).port


def metrics_server(stack):
    handler = MetricsHandler.factory(CollectorRegistry())
    return stack.enter_context(BoundedHTTPServer(("127.0.0.1", 0), handler, name="metrics")).port


@pytest.mark.parametrize(
    ("server", "status"), [(progress_server, 401), (metrics_server, 200)], ids=["/progress", "/metrics"]
)
def test_the_learners_own_routes_stand_under_the_bound(monkeypatch, server, status):
    monkeypatch.setattr(progress, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(progress, "LONGEST_S", 2.0)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server(stack))
        before = threading.active_count()
        idle = [stack.enter_context(socket.create_connection(address, timeout=20)) for _ in range(3)]
        idle[0].sendall(b"GET / HT")
        refused = stack.enter_context(socket.create_connection(address, timeout=20))
        assert refused.recv(1) == b""
        assert threading.active_count() <= before + 2 * 3
        for connection in idle:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        while True:  # the threads give their places back a moment after they have closed
            connection = http.client.HTTPConnection(*address, timeout=20)
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                connection.request("GET", "/")
                assert connection.getresponse().status == status
                break


def test_idle_connections_are_bounded_and_give_way(address):
    before = threading.active_count()
    idle = [socket.create_connection(address, timeout=20) for _ in range(3)]
    idle[0].sendall(b"GET / HT")
    refused = socket.create_connection(address, timeout=20)
    assert refused.recv(1) == b""
    assert threading.active_count() <= before + 2 * 3  # a thread and a timer each
    for connection in idle:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    while not answered(address):  # the threads give their places back a moment after they have closed
        time.sleep(0.01)
