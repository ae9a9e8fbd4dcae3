"""Ports of this machine, and a token as the processes of a job read it."""

import contextlib
import socket

import pytest

LOOPBACK = "127.0.0.1"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


@pytest.fixture
def squatter():
    with contextlib.ExitStack() as stack:

        def squat(port):
            listening = stack.enter_context(socket.socket())
            listening.bind((LOOPBACK, port))
            listening.listen()

        yield squat
