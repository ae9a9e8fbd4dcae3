"""Ports of this machine, and a token as the processes of a job read it."""

import contextlib
import socket

import pytest

from tests.support.ports import free_port

LOOPBACK = "127.0.0.1"


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def squatter():
    with contextlib.ExitStack() as stack:

        def squat(port):
            listening = stack.enter_context(socket.socket())
            listening.bind((LOOPBACK, port))
            listening.listen()

        yield squat
