"""The learner's port for one server: it lets the server's workers in, and nobody else.

Each connection has a thread of its own for the few milliseconds of its handshake, so a stranger who says nothing, or a
byte at a time, keeps nobody waiting. There are at most `MAX_HALF_OPEN` of them: one more ends the oldest. A worker
needs one round trip, so it is the oldest only in a flood, and then it dials again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection

from stage2_trainer.sync.transports.connection import Connection
from stage2_trainer.sync.transports.handshake import Member, admit
from stage2_trainer.sync.transports.link import Link
from stage2_trainer.wire.errors import LinkError

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 10.0
MAX_HALF_OPEN = 256
BACKLOG = 1024
CHECK_INTERVAL_S = 0.05
ACCEPT_PAUSE_S = 0.05  # after an error of accept(), such as too many open files


class LinkListener:
    """A listening port, open until it is closed. Links that nobody waits for are not let in.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, address: str, port: int, token: str) -> None:
        self._token = token
        self._socket = _listen(address, port)
        self._changed = threading.Condition()
        self._expected: frozenset[Member] = frozenset()
        self._links: dict[Member, Link] = {}
        self._half_open: dict[Connection, None] = {}  # in the order of their coming
        self._closed = False
        self._thread = threading.Thread(target=self._accept_all, daemon=True, name=f"link-port-{port}")
        self._thread.start()

    def expect(self, members: Collection[Member]) -> None:
        """Let these members in, instead of those that were expected before."""
        with self._changed:
            for link in self._links.values():
                link.close()
            self._expected, self._links = frozenset(members), {}

    def take(self, timeout_s: float, check: Callable[[], None]) -> list[Link]:
        """Return the links of all expected members, in the order of their ranks; `check` raises to end the wait.

        Raises:
            TimeoutError: some did not come.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while len(self._links) < len(self._expected):
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._changed.wait(CHECK_INTERVAL_S)
            links = sorted(self._links.items(), key=lambda found: found[0].rank)
            self._expected, self._links = frozenset(), {}
            return [link for _, link in links]

    def close(self) -> None:
        """Give the port back, and end what has not been taken."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept() of the thread
        self._thread.join()
        self._socket.close()
        with self._changed:
            half_open = list(self._half_open)
        for connection in half_open:
            connection.abort()
        self.expect(())

    def _accept_all(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                time.sleep(ACCEPT_PAUSE_S)
                continue
            connection = Connection(accepted)
            self._make_room_for(connection)
            threading.Thread(target=self._let_in, args=(connection,), daemon=True, name="link-handshake").start()

    def _make_room_for(self, connection: Connection) -> None:
        with self._changed:
            self._half_open[connection] = None
            if len(self._half_open) > MAX_HALF_OPEN:
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.abort()

    def _expects(self, member: Member) -> bool:
        return member in self._expected and member not in self._links

    def _let_in(self, connection: Connection) -> None:
        try:
            member, keys = admit(connection, self._token, self._expects, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        except LinkError as error:
            logger.debug("a connection was turned away: %s", error)
            connection.close()
            return
        finally:
            with self._changed:
                self._half_open.pop(connection, None)
        with self._changed:
            if self._expects(member):
                self._links[member] = Link.of_learner(connection, keys)
                self._changed.notify_all()
                return
        connection.close()


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((address, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
