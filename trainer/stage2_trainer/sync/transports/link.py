"""A link between the learner and one worker: messages that only the other side can have sent, or read, in order.

After the handshake each side encrypts its messages with AES-GCM, under its own key of the link and a counter.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from stage2_trainer.sync.transports.connection import Bytes, Connection
from stage2_trainer.sync.transports.handshake import Member, SessionKeys, introduce
from stage2_trainer.wire.errors import LinkError

SLICE_BYTES = 2**20  # encrypted and sent, or received and decrypted, while it is in a core's own cache
TAG_BYTES = 16
CONNECT_TIMEOUT_S = 10.0
TRIES, PAUSE_S = 4, 0.1


class Link:
    """One side of a link."""

    def __init__(self, connection: Connection, *, own_key: bytes, other_key: bytes) -> None:
        self._connection = connection
        self._own, self._other = _Direction(own_key), _Direction(other_key)

    @classmethod
    def of_learner(cls, connection: Connection, keys: SessionKeys) -> Link:
        """Return the learner's side."""
        return cls(connection, own_key=keys.of_learner, other_key=keys.of_worker)

    @classmethod
    def of_worker(cls, connection: Connection, keys: SessionKeys) -> Link:
        """Return a worker's side."""
        return cls(connection, own_key=keys.of_worker, other_key=keys.of_learner)

    @property
    def sent(self) -> int:
        """Bytes that went out by this side, the handshake's included, as they were counted at the socket."""
        return self._connection.sent

    def send(self, pieces: Iterable[Bytes], timeout_s: float) -> None:
        """Send a message, made of these pieces. Raises LinkError, also when that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        cipher = self._own.next().encryptor()
        crossing = self._own.memory()
        filled = 0
        for part in _slices(pieces):
            if filled + len(part) > SLICE_BYTES:
                self._connection.send(crossing[:filled], deadline)
                filled = 0
            filled += cipher.update_into(part, crossing[filled:])
        self._connection.send(crossing[:filled], deadline)
        cipher.finalize()
        self._connection.send(cipher.tag, deadline)

    def receive_into(self, view: memoryview, timeout_s: float) -> None:
        """Fill `view` with the next message, which must be as long.

        Raises:
            LinkError: the link broke, the bytes are not those of the other side, or it takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        cipher = self._other.next().decryptor()
        crossing = self._other.memory()
        for part in _slices([view]):
            arrived = crossing[: len(part)]
            self._connection.receive_into(arrived, deadline)
            cipher.update_into(arrived, part)
        try:
            cipher.finalize_with_tag(self._connection.receive(TAG_BYTES, deadline))
        except InvalidTag as error:
            raise LinkError(f"message {self._other.count} is not what the other side has sent") from error

    def receive(self, count: int, timeout_s: float) -> bytes:
        """Return the next message, of `count` bytes. Raises LinkError."""
        data = bytearray(count)
        self.receive_into(memoryview(data), timeout_s)
        return bytes(data)

    def is_lost(self) -> bool:
        """Whether the other side has gone, on a link on which it has nothing to send."""
        return self._connection.has_something()

    def abort(self) -> None:
        """End the link; what waits in it fails at once, on both sides."""
        self._connection.abort()

    def close(self) -> None:
        """End the link."""
        self._connection.close()


def sent_by(links: Iterable[Link]) -> int:
    """Return the bytes that went out over links by this side."""
    return sum(link.sent for link in links)


def abort_all(links: Iterable[Link]) -> None:
    """End links, for both sides."""
    for link in links:
        link.abort()


class _Direction:
    """The ciphers of one direction: no two messages have the same number under one key. One message at a time."""

    def __init__(self, key: bytes) -> None:
        self.count = 0
        self._key = AES(key)
        self._memory: memoryview | None = None

    def next(self) -> Cipher[GCM]:
        """Return the cipher of the next message."""
        self.count += 1
        return Cipher(self._key, GCM(self.count.to_bytes(12, "big")))

    def memory(self) -> memoryview:
        """Return where a slice is as it crosses; made once, at the first message."""
        if self._memory is None:
            self._memory = memoryview(bytearray(SLICE_BYTES))
        return self._memory


def dial(address: tuple[str, int], token: str, member: Member, *, timeout_s: float) -> Link:
    """Return a worker's side of a new link to the learner.

    Raises:
        LinkError: nobody listens there, or nobody who proves the job's token.
    """
    deadline = time.monotonic() + timeout_s
    for tries_left in reversed(range(TRIES)):
        try:
            return _dial_once(address, token, member, deadline)
        except LinkError as error:
            # A flood of strangers can push a handshake out of the learner's bounded room.
            if not tries_left or time.monotonic() > deadline:
                raise LinkError(f"learner at {address[0]}:{address[1]}: {error}") from error
            time.sleep(PAUSE_S)
    raise AssertionError("unreachable")


def _dial_once(address: tuple[str, int], token: str, member: Member, deadline: float) -> Link:
    patience = min(max(deadline - time.monotonic(), 0.0), CONNECT_TIMEOUT_S)
    try:
        dialled = socket.create_connection(address, timeout=patience)
    except OSError as error:
        raise LinkError(error.strerror or str(error)) from error
    connection = Connection(dialled)
    try:
        return Link.of_worker(connection, introduce(connection, token, member, deadline))
    except LinkError:
        connection.close()
        raise


def _slices(pieces: Iterable[Bytes]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]
