"""Ports of this machine, and a token as the processes of a job read it."""

import contextlib
import socket

import pytest

from stage2_api.pod.layout import TOKEN_FILE_VARIABLE

LOOPBACK = "127.0.0.1"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


@pytest.fixture
def token(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("a-token-of-this-test\n")
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(path))
    return "a-token-of-this-test"


@pytest.fixture
def squatter():
    with contextlib.ExitStack() as stack:

        def squat(port):
            listening = stack.enter_context(socket.socket())
            listening.bind((LOOPBACK, port))
            listening.listen()

        yield squat
