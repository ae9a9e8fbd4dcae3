"""TCP keep-alive: connections end when the other machine disappears, long before a call's own deadline.

A process that ends closes its connections, and the other end knows at once. A machine that loses its power or its
network closes nothing, so the kernel has to ask whether a silent peer is still there (tcp(7)).
"""

from __future__ import annotations

import socket
from typing import Any

IDLE_S, EVERY_S, TRIES = 30, 10, 3
NOTICED_S = IDLE_S + TRIES * EVERY_S
"""Seconds until a connection to a machine that has disappeared ends."""


def enable_keep_alive(connected: socket.socket) -> None:
    """Make the kernel end an idle connection whose peer does not answer for NOTICED_S seconds."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TRIES)


def keep_alive_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket that also ends where the peer has not acknowledged what was sent for NOTICED_S seconds.

    address: an entry of `getaddrinfo`, which aiohttp passes to a `socket_factory`.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    enable_keep_alive(made)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * NOTICED_S)
    return made
