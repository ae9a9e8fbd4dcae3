"""A port for learner processes that meet."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
