"""A TCP connection on which every call has a deadline. All of a link's calls of the network are here.

The kernel keeps the deadlines (SO_RCVTIMEO, SO_SNDTIMEO), so a call moves all its bytes in one go, where a socket with
Python's own timeout asks before each piece whether there is one.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from stage2_trainer.wire.errors import LinkError

Bytes = bytes | bytearray | memoryview
KEEP_ALIVE_S = 30  # a machine that is gone says nothing: the kernel asks it
_TIMEVAL = struct.Struct("ll")


class Connection:
    """A connection; deadlines are points of `time.monotonic`. sent: bytes that the kernel has taken so far."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(True)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S)
        self.sent = 0
        self._socket = connected
        self._in_use = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def send(self, data: Bytes, deadline: float) -> None:
        """Send all of `data`. Raises LinkError."""
        rest = memoryview(data)
        while len(rest):
            with self._waiting(socket.SO_SNDTIMEO, deadline):
                count = self._socket.send(rest)
            self.sent += count
            rest = rest[count:]

    def receive_into(self, view: memoryview, deadline: float) -> None:
        """Fill `view`. Raises LinkError."""
        while len(view):
            with self._waiting(socket.SO_RCVTIMEO, deadline):
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not count:
                raise LinkError("the other side has closed the connection")
            view = view[count:]

    def receive(self, count: int, deadline: float) -> bytes:
        """Return the next `count` bytes. Raises LinkError."""
        data = bytearray(count)
        self.receive_into(memoryview(data), deadline)
        return bytes(data)

    def has_something(self) -> bool:
        """Whether bytes are there to be read, or the end of the connection is."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0])
        except (OSError, ValueError):  # closed
            return True

    def abort(self) -> None:
        """End the connection; a call of another thread that waits in it fails at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its descriptor back."""
        self.abort()
        with self._in_use:
            self._socket.close()

    @contextlib.contextmanager
    def _waiting(self, option: int, deadline: float) -> Iterator[None]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise LinkError("not in time")
        with self._in_use:
            try:
                self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(remaining))
                yield
            except BlockingIOError as error:
                raise LinkError("not in time") from error
            except OSError as error:
                raise LinkError(f"the connection broke: {error.strerror or error}") from error


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, max(1, int((seconds - whole) * 1e6)))  # zero would mean for ever
