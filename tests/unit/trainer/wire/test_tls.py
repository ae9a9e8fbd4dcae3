"""TLS between learner and servers: what is refused, on which side, and the sentence that says so."""

import contextlib
import os
import socketserver
import threading
from datetime import UTC, datetime, timedelta

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire import credentials
from stage2_trainer.wire.client import ServerClient, trusts_proxies
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import RolloutRequest, Sampling, SeedPlan
from tests.support import certificates, http_server

LONG_AGO = datetime.now(UTC) - timedelta(days=500)


class Handler(http_server.QuietHandler):
    """Says that it holds no weights, and keeps what it is sent."""

    def do_GET(self):
        self.server.headers.append(self.headers.get("Authorization"))
        body = b'{"weight_version": "0"}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serving(files=None):
    with http_server.serving(Handler) as server:
        server.headers = []
        server.tls = credentials.Certificate(str(files.certificate), str(files.key)).context() if files else None
        yield server


@pytest.fixture
def files(tmp_path):
    return certificates.make(tmp_path / "own")


@pytest.fixture
def trusting(monkeypatch):
    """A function that sets whom this process believes."""
    return lambda files: monkeypatch.setenv("STAGE2_TLS_CA_FILE", str(files.authority))


def ask(server, scheme="https", host="localhost"):
    url = f"{scheme}://{host}:{server.server_port}"
    client = ServerClient(url, "secret", timeout_s=10)
    return client.weight_version()


def ask_for_rollouts(server, scheme="https", host="localhost"):
    url = f"{scheme}://{host}:{server.server_port}"
    with ServerBackend([url], token="secret", sampling=Sampling(max_new_tokens=4), timeout_s=10) as backend:
        return backend.generate([RolloutRequest(messages=[])], seed_plan=SeedPlan(0, 0, 0))


asking = pytest.mark.parametrize("asked", [ask, ask_for_rollouts], ids=["control", "rollouts"])


def test_client_sends_token_to_trusted_tls_server(files, trusting):
    trusting(files)
    with serving(files) as server:
        assert ask(server) == "0"
        assert server.headers == ["Bearer secret"]


@asking
@pytest.mark.parametrize(
    ("shown", "message"),
    [
        ("another authority's", r"not of the authority in .*ca\.crt.*a stranger answers there"),
        ("for another host", "its certificate is not for localhost: write a name in its base_url"),
        ("expired", "not valid now .*expired.*suspended and resumed"),
        ("none", "it answers without TLS: write http:// in its base_url"),
    ],
)
def test_client_does_not_send_token_to_untrusted_server(files, tmp_path, trusting, asked, shown, message):
    at, host = (LONG_AGO, "localhost") if shown == "expired" else (None, "localhost")
    host = "elsewhere" if shown == "for another host" else host
    theirs = certificates.make(tmp_path / "theirs", host, at=at)
    trusting(files if shown == "another authority's" else theirs)
    with serving(None if shown == "none" else theirs) as server:
        with pytest.raises(ServerError, match=message) as error:
            asked(server)
        assert server.headers == []
    assert error.value.status is None, "it is waited for: it may be started again"
    assert "\n" not in str(error.value)


def test_client_without_ca_file_trusts_no_server(files, monkeypatch):
    monkeypatch.delenv("STAGE2_TLS_CA_FILE", raising=False)
    with serving(files) as server:
        with pytest.raises(ServerError, match="set STAGE2_TLS_CA_FILE to the authority of its certificate"):
            ask(server)
        assert server.headers == []


@asking
def test_plain_http_to_tls_port_is_reported(files, asked):
    with (
        serving(files) as server,
        pytest.raises(ServerError, match="it answers over TLS alone: write https:// in its base_url"),
    ):
        asked(server, scheme="http")


@asking
def test_server_that_closes_connections_is_not_reported_as_tls(asked):
    class Ends(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Ends) as server:
        server.server_port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ServerError) as error:
            asked(server, scheme="http")
        server.shutdown()
    assert "TLS" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ("", "no certificate or crl found"), ("text", "no certificate")]
)
def test_unreadable_ca_file_is_config_error(tmp_path, content, message):
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"STAGE2_TLS_CA_FILE.*{message}.*set STAGE2_TLS_CA_FILE to the certificate"):
        credentials.trust("https://a:1", {"STAGE2_TLS_CA_FILE": str(path)})
    assert credentials.trust("http://a:1", {"STAGE2_TLS_CA_FILE": str(path)}) is None


def test_https_server_needs_certificate_and_http_server_does_not(files):
    assert credentials.required_certificate("http://a:1", {}) is None
    with pytest.raises(ConfigError, match=r"STAGE2_TLS_CERT_FILE.*whose base_url is https://a:1.*or write http://"):
        credentials.required_certificate("https://a:1", {})
    found = credentials.required_certificate("https://a:1", files.environment())
    assert found == credentials.Certificate(str(files.certificate), str(files.key))


@pytest.mark.parametrize("wrong", ["no key", "another's key", "no certificate", "expired", "unreadable"])
def test_unusable_certificate_is_config_error(files, tmp_path, wrong):
    theirs = certificates.make(tmp_path / "theirs", at=LONG_AGO)
    environment = dict(files.environment())
    environment |= {
        "no key": {"STAGE2_TLS_KEY_FILE": ""},
        "another's key": {"STAGE2_TLS_KEY_FILE": str(theirs.key)},
        "no certificate": {"STAGE2_TLS_CERT_FILE": str(files.key)},
        "expired": dict(theirs.environment()),
        "unreadable": {"STAGE2_TLS_CERT_FILE": str(tmp_path / "missing")},
    }[wrong]
    message = {
        "no key": "STAGE2_TLS_KEY_FILE.*must name the key",
        "another's key": "key values mismatch",
        "no certificate": "must be a certificate",
        "expired": "has expired at",
        "unreadable": "No such file",
    }[wrong]
    with pytest.raises(ConfigError, match=message):
        credentials.own_certificate(environment)


def test_no_certificate_is_loaded_when_none_is_configured():
    assert "STAGE2_TLS_CERT_FILE" not in os.environ
    assert credentials.own_certificate({}) is None


@pytest.mark.parametrize(
    ("base_url", "through"),
    [
        ("https://job-rollout.team-a.svc:8000", False),
        ("http://job-rollout.team-a.svc.cluster.local:8000", False),
        ("http://127.0.0.1:8000", False),
        ("https://servers.example:8000", True),
    ],
)
def test_proxy_is_not_used_for_cluster_or_loopback_servers(base_url, through):
    """A template may set HTTPS_PROXY for downloads."""
    assert trusts_proxies(base_url) is through
