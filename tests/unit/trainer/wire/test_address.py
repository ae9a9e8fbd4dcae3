"""The parts of a server's address."""

import pytest

from stage2_trainer.wire.credentials import host_and_port, is_loopback


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
