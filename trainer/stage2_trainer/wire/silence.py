"""Connections that end when the other machine has gone without a word, long before a call's own deadline.

A process that ends closes its connections, and the other end knows at once. A machine that loses its power or its
network closes nothing: the kernel asks a silent peer whether it is there (TCP keep-alive, tcp(7)).
"""

from __future__ import annotations

import socket
from typing import Any

IDLE_S, EVERY_S, TRIES = 30, 10, 3
NOTICED_S = IDLE_S + TRIES * EVERY_S
"""Seconds after which a peer that has gone is noticed."""


def notice_silence(connected: socket.socket) -> None:
    """Make the kernel end a connection whose peer has not answered for NOTICED_S seconds, while nothing is sent."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TRIES)


def noticing_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for calls, which ends as well when what is sent stays without an answer of the kernel's peer.

    address: of `getaddrinfo`, as aiohttp's `socket_factory` gets it.
    """
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    notice_silence(made)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * NOTICED_S)
    return made
