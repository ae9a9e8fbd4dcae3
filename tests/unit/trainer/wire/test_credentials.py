"""A server's address, and the token: it comes from a file, or the server does not start."""

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.wire.credentials import host_and_port, is_loopback, read_token


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("http://job-rollout.ns.svc:8001", ("job-rollout.ns.svc", 8001)),
        ("http://[::1]:9", ("::1", 9)),
        ("https://host", ("host", 443)),
    ],
)
def test_host_and_port_are_read(url, expected):
    assert host_and_port(url) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.4", False), ("job-rollout", False)],
)
def test_loopback_is_recognised(host, expected):
    assert is_loopback(host) is expected


def test_token_is_file_content_without_line_end(tmp_path):
    path = tmp_path / "token"
    path.write_text("secret\n")
    assert read_token({"STAGE2_TOKEN_FILE": str(path)}) == "secret"


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda folder: "", "must name a file"),
        (lambda folder: str(folder / "missing"), "must be a readable file"),
        (lambda folder: str(folder), "must be a readable file"),
        (lambda folder: str((folder / "empty").write_text(" \n") and folder / "empty"), "must not be empty"),
    ],
)
def test_missing_token_is_config_error_with_advice(tmp_path, make, rule):
    with pytest.raises(ConfigError, match=rule) as caught:
        read_token({"STAGE2_TOKEN_FILE": make(tmp_path)})
    assert "openssl rand" in caught.value.problems[0].way_out
