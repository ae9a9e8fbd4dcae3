"""Ports that nothing listens on."""

import contextlib
import random
import socket


def free_port() -> int:
    """Return a port below those that the system gives to outgoing connections, because it is used only later."""
    while True:
        port = random.SystemRandom().randrange(10_000, 29_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
