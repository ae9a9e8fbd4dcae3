"""The learner's state goes to whoever holds the token, and into the termination log; idle clients are bounded."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading

import httpx
import pytest
from prometheus_client import CollectorRegistry, MetricsHandler

from stage2_api.pod.report import SyncStatus
from stage2_trainer.telemetry import progress
from stage2_trainer.telemetry.progress import BoundedHTTPServer, ProgressServer, Reporter
from stage2_trainer.wire import credentials
from tests.support import certificates

SYNC = SyncStatus(requested_mode="auto", effective_mode="full").pushed(3, 0.5, ("http://a:1", "http://b:2"))


@pytest.fixture
def reporter():
    reporter = Reporter()
    reporter.update(step=3, max_steps=9, phase="training", loss=1.5, tokens_per_second=80.0, sync=SYNC)
    reporter.update(reproducibility={"servers": ["a"]})
    return reporter


@pytest.fixture
def server(reporter):
    with ProgressServer(reporter, host="127.0.0.1", port=0, token="secret") as server:
        yield server


def ask(server, route="/progress", token="secret"):
    url = f"http://127.0.0.1:{server.port}{route}"
    return httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


def test_progress_is_served_as_documented_json(server):
    assert ask(server).json() == {
        "step": 3,
        "maxSteps": 9,
        "resumedStep": None,
        "phase": "training",
        "loss": 1.5,
        "tokensPerSecond": 80.0,
        "bestStep": None,
        "bestScore": None,
        "restarts": 0,
        "sync": {
            "version": 3,
            "pushes": 0,
            "requestedMode": "auto",
            "effectiveMode": "full",
            "merge": None,
            "mergeReason": None,
            "transport": None,
            "gigabytesPerSecond": None,
            "phases": None,
            "seconds": 0.5,
            "servers": [{"baseUrl": "http://a:1", "version": 3}, {"baseUrl": "http://b:2", "version": 3}],
        },
        "reproducibility": {"servers": ["a"]},
        "message": "",
    }


def test_progress_route_returns_latest_state(server, reporter):
    reporter.update(step=4, phase="done")
    assert (ask(server).json()["step"], ask(server).json()["phase"]) == (4, "done")


@pytest.mark.parametrize("token", ["wrong", "secret2"])
def test_progress_with_wrong_token_is_refused(server, token):
    response = ask(server, token=token)
    assert response.status_code == 401
    assert "step" not in response.text


def test_progress_without_token_is_refused(server):
    assert httpx.get(f"http://127.0.0.1:{server.port}/progress", trust_env=False).status_code == 401


def test_other_routes_return_404(server):
    assert ask(server, "/").status_code == 404


def test_termination_log_holds_last_state(reporter, tmp_path):
    reporter.write_termination_log(tmp_path / "log")
    assert json.loads((tmp_path / "log").read_text()) == reporter.current.document()


def test_termination_log_stays_within_kubernetes_limit(reporter, tmp_path):
    reporter.update(message="x" * 5000, reproducibility={"servers": ["y" * 5000]})
    reporter.write_termination_log(tmp_path / "log")
    assert (tmp_path / "log").stat().st_size <= 4096
    assert json.loads((tmp_path / "log").read_text())["step"] == 3


@pytest.fixture
def guarded(reporter, tmp_path):
    """A server with a certificate, and what is believed of it."""
    files = certificates.make(tmp_path)
    context = credentials.Certificate(str(files.certificate), str(files.key)).context()
    with ProgressServer(reporter, host="127.0.0.1", port=0, token="secret", tls=context) as server:
        yield server, ssl.create_default_context(cafile=files.authority)


def test_progress_is_served_over_tls(guarded):
    server, trusted = guarded
    url = f"https://localhost:{server.port}/progress"
    found = httpx.get(url, headers={"Authorization": "Bearer secret"}, trust_env=False, verify=trusted)
    assert found.json()["step"] == 3


def test_client_without_tls_blocks_nobody_and_logs_no_traceback(guarded, capfd):
    server, trusted = guarded
    with pytest.raises(httpx.TransportError):
        ask(server)
    silent = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    test_progress_is_served_over_tls((server, trusted))
    silent.setblocking(False)
    with pytest.raises(BlockingIOError):  # nobody has closed it yet
        silent.recv(1)
    silent.close()
    assert "Traceback" not in capfd.readouterr().err


def progress_server(stack):
    return stack.enter_context(ProgressServer(Reporter(), host="127.0.0.1", port=0, token="secret")).port


def metrics_server(stack):
    handler = MetricsHandler.factory(CollectorRegistry())
    return stack.enter_context(BoundedHTTPServer(("127.0.0.1", 0), handler, name="metrics")).port


ROUTES, IDS = [(progress_server, 401), (metrics_server, 200)], ["/progress", "/metrics"]


@pytest.mark.parametrize(("server", "status"), ROUTES, ids=IDS)
def test_slow_clients_of_learner_routes_are_cut_off(monkeypatch, server, status):
    usual = progress.LONGEST_S
    monkeypatch.setattr(progress, "LONGEST_S", 2.0)  # by the clock: their requests never end
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server(stack))
        idle = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(3)]
        idle[0].sendall(b"GET / HT")
        for connection in idle:
            assert is_closed(connection)
        monkeypatch.setattr(progress, "LONGEST_S", usual)
        assert asked(address) == status


@pytest.mark.parametrize(("server", "status"), ROUTES, ids=IDS)
def test_too_many_clients_of_learner_routes_close_oldest(monkeypatch, server, status):
    monkeypatch.setattr(progress, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(progress, "LONGEST_S", 600.0)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server(stack))
        before = threading.active_count()
        idle = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(12)]
        assert all(is_closed(connection) for connection in idle[:9])
        assert asked(address) == status
        assert threading.active_count() <= before + 2 * 3
        for connection in idle[10:]:
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


@pytest.mark.parametrize(("server", "status"), ROUTES, ids=IDS)
@pytest.mark.parametrize(
    ("start", "again"),
    [(b"GET /", b"a"), (b"GET / HTTP/1.0\r\n", b"x: y\r\n"), (b"GET / HTTP/1.0\r\n", b"x: " + b"y" * 60_000 + b"\r\n")],
    ids=["path", "headers", "large headers"],
)
def test_endless_request_to_learner_is_cut_off(monkeypatch, server, status, start, again):
    read = 0
    plain = progress._FirstBytes.readinto

    def counting(self, buffer):
        nonlocal read
        count = plain(self, buffer)
        read += count
        return count

    monkeypatch.setattr(progress._FirstBytes, "readinto", counting)
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server(stack))
        connection = stack.enter_context(socket.create_connection(address, timeout=60))
        with contextlib.suppress(OSError):
            connection.sendall(start)
            for _ in range(200):
                connection.sendall(again * (60_000 // len(again) or 1))
        with contextlib.suppress(OSError):
            while connection.recv(65536):
                pass
        assert 0 < read <= progress.MOST_BYTES
        assert asked(address) == status


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def asked(address):
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().status
