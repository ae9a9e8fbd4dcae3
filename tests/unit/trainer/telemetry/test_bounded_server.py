"""Idle clients of the learner's routes take a bounded number of threads, and only for a while."""

import contextlib
import http.client
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, MetricsHandler

from stage2_trainer.telemetry import progress
from stage2_trainer.telemetry.progress import BoundedHTTPServer, ProgressServer, Reporter


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
        while True:  # a thread is free for others a moment after it has closed its connection
            connection = http.client.HTTPConnection(*address, timeout=20)
            with contextlib.suppress(ConnectionError, http.client.HTTPException):
                connection.request("GET", "/")
                assert connection.getresponse().status == status
                break
