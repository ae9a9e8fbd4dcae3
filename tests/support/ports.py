"""Ports that nothing listens on, and that no other test was given."""

import contextlib
import random
import socket

_CLAIMS: list[socket.socket] = []  # names that last as long as this process, and that all of this machine see


def free_port() -> int:
    """Return a port; see `free_ports`."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row, which stay this process's own, because much is bound only later.

    They are below those that the system gives to outgoing connections.
    """
    while True:
        first = random.SystemRandom().randrange(10_000, 29_000)
        claims = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port, claim in enumerate(claims, first):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                claim.bind(f"\0stage2-test-port-{port}")
            _CLAIMS.extend(claims)
            return first
