"""A link between the learner and one worker: a TCP connection, over TLS where the server's base_url is https://.

Over TLS both ends show their certificates: the learner checks the worker's against the job's authority, and the worker
accepts exactly the certificate that the learner's guarded call has announced. The worker's first message proves the
job's token for one place in one group, and the learner's answer proves it back; the name of a group is used once, so
nobody can use a recorded proof in another group. Without TLS the two proofs are all that authenticates, and whoever is
on the way can read and change what follows (docs/threat-model.md). Every wait has a deadline, and `abort` ends it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from stage2_api.vllm import Transport
from stage2_trainer.wire.credentials import Certificate, error_reason
from stage2_trainer.wire.errors import LinkError
from stage2_trainer.wire.keep_alive import enable_keep_alive

Bytes = bytes | bytearray | memoryview

INIT_PHASE = "connect"
LEARNER_RANK = 0
_MEMBER = struct.Struct("!16sI")

MAGIC = b"stage2 link 3\0\0\0"
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + _MEMBER.size + PROOF_BYTES
LEARNER, WORKER = b"learner", b"worker"

SLICE_BYTES = 2**20  # of one call to the socket
CONNECT_TIMEOUT_S = 10.0
TRIES, PAUSE_S = 4, 0.1


@dataclass(frozen=True)
class Member:
    """A worker's position: the group that the learner has announced to its server, and its rank in it."""

    group: str
    rank: int
    SIZE: ClassVar[int] = _MEMBER.size

    def to_bytes(self) -> bytes:
        """Return the form on the wire, of fixed size."""
        return _MEMBER.pack(uuid.UUID(self.group).bytes, self.rank)

    @classmethod
    def from_bytes(cls, data: bytes) -> Member:
        """Read `to_bytes` back; any bytes of that size are a member of some group."""
        group, rank = _MEMBER.unpack(data)
        return cls(uuid.UUID(bytes=group).hex, rank)


@dataclass
class GroupInfo:
    """The group to join, and the server's ranks in it: the `init_info` of POST /init_weight_transfer_engine.

    rank_offset: rank of the server's first worker; workers of other servers may have the ranks around its own.
    packed_buffer_size_bytes: bucket limit (see `plan_buckets`).
    name: unique for each group, so that a late joiner of an earlier group cannot enter this one.
    timeout_s: seconds that any wait in the group may take on the server's side.
    certificate: SHA-256, in hex, of the certificate that the learner shows; empty = links without TLS.
    """

    transport: Transport
    master_address: str
    master_port: int
    world_size: int
    packed_buffer_size_bytes: int
    name: str
    timeout_s: float
    rank_offset: int = 1
    certificate: str = ""

    def members(self, workers: int) -> list[Member]:
        """Return the server's workers as members of the group, by rank."""
        return [Member(self.name, self.rank_offset + number) for number in range(workers)]


def new_group_name() -> str:
    """Return a name that no other group has."""
    return uuid.uuid4().hex


def address_towards(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave: the one that this host can reach back.

    Raises:
        OSError: the host has no address, or there is no way to it.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


class Link:
    """One end of a link. One message at a time. sent: bytes of messages that went out here, without TLS's framing."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keep_alive(connected)
        self.sent = 0
        self._socket = connected
        self._in_use = threading.Lock()

    def send(self, pieces: Iterable[Bytes], timeout_s: float) -> None:
        """Send a message in pieces. Raises LinkError, also when that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._in_use, _as_link_errors():
            for part in _slices(pieces):
                self._socket.settimeout(_remaining(deadline))
                self._socket.sendall(part)
                self.sent += len(part)

    def receive_into(self, view: memoryview, timeout_s: float) -> None:
        """Fill `view` with the next message, which must be as long.

        Raises:
            LinkError: the link broke, or it takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._in_use, _as_link_errors():
            while len(view):
                self._socket.settimeout(_remaining(deadline))
                count = self._socket.recv_into(view, min(len(view), SLICE_BYTES))
                if not count:
                    raise LinkError("the other side has closed the connection")
                view = view[count:]

    def receive(self, count: int, timeout_s: float) -> bytes:
        """Return the next message, of `count` bytes. Raises LinkError."""
        data = bytearray(count)
        self.receive_into(memoryview(data), timeout_s)
        return bytes(data)

    def admit(self, token: str, is_expected: Callable[[Member], bool], timeout_s: float) -> Member:
        """On the learner: check the proof of the worker that dialled, and prove the token back.

        Raises:
            LinkError: the worker has no certificate of the job, lacks the token, is not expected, or is too slow.
        """
        deadline = time.monotonic() + timeout_s
        self._shake_hands(deadline)
        hello = self.receive(HELLO_BYTES, _remaining(deadline))
        claim, proof = hello[:-PROOF_BYTES], hello[-PROOF_BYTES:]
        if not claim.startswith(MAGIC) or not hmac.compare_digest(proof, _proof(token, WORKER, claim)):
            raise LinkError("the other side does not prove the job's token")
        member = Member.from_bytes(claim[len(MAGIC) :])
        if not is_expected(member):
            raise LinkError("nobody expects the other side: its group was given up")
        self.send([_proof(token, LEARNER, claim)], _remaining(deadline))
        return member

    def introduce(self, token: str, member: Member, certificate: str, deadline: float) -> None:
        """On a worker: prove the token to the learner, and check the learner's proof.

        certificate: SHA-256 of the certificate that the learner must show, in hex; empty = without TLS.

        Raises:
            LinkError: the other side is no learner with the token, or is too slow.
        """
        self._shake_hands(deadline)
        if certificate and not hmac.compare_digest(self._peer_certificate(), certificate):
            raise LinkError("what listens there shows another certificate than the learner's call has announced")
        claim = MAGIC + member.to_bytes()
        self.send([claim + _proof(token, WORKER, claim)], _remaining(deadline))
        if not hmac.compare_digest(self.receive(PROOF_BYTES, _remaining(deadline)), _proof(token, LEARNER, claim)):
            raise LinkError("what listens there does not prove the job's token")

    def is_lost(self) -> bool:
        """Whether the other side has gone, on a link on which it has nothing to send."""
        try:
            return bool(select.select([self._socket], [], [], 0)[0])
        except (OSError, ValueError):  # closed
            return True

    def abort(self) -> None:
        """End the link; what waits in it fails at once, on both sides."""
        with contextlib.suppress(OSError):
            # Not SSLSocket's own method: it would let a call under way continue without TLS.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the link, and give its descriptor back."""
        self.abort()
        with self._in_use:
            self._socket.close()

    def _shake_hands(self, deadline: float) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            with self._in_use, _as_link_errors():
                self._socket.settimeout(_remaining(deadline))
                self._socket.do_handshake()

    def _peer_certificate(self) -> str:
        shown = self._socket.getpeercert(binary_form=True) if isinstance(self._socket, ssl.SSLSocket) else None
        return hashlib.sha256(shown or b"").hexdigest()


def abort_all(links: Iterable[Link]) -> None:
    """End links, for both sides."""
    for link in links:
        link.abort()


def dial(info: GroupInfo, rank: int, *, token: str, certificate: Certificate | None) -> Link:
    """Return a worker's end of a new link to the learner, for a rank of its group.

    certificate: the worker's own; None = it has none.

    Raises:
        ValueError: the learner announces TLS, and this server has no certificate.
        LinkError: nobody listens there, or nobody who is the learner.
    """
    context = None
    if info.certificate:
        if certificate is None:
            raise ValueError("the learner's links are over TLS, and this server has no certificate")
        context = certificate.worker_context()
    deadline = time.monotonic() + info.timeout_s
    for tries_left in reversed(range(TRIES)):
        try:
            return _dial_once(info, rank, token, context, deadline)
        except LinkError as error:
            # A flood of strangers can push a connection out of the learner's bounded room.
            if not tries_left or time.monotonic() > deadline:
                raise LinkError(f"learner at {info.master_address}:{info.master_port}: {error}") from error
            time.sleep(PAUSE_S)
    raise AssertionError("unreachable")


def _dial_once(info: GroupInfo, rank: int, token: str, context: ssl.SSLContext | None, deadline: float) -> Link:
    patience = min(_remaining(deadline), CONNECT_TIMEOUT_S)
    with _as_link_errors():
        dialled = socket.create_connection((info.master_address, info.master_port), timeout=patience)
        if context is not None:
            dialled = context.wrap_socket(dialled, do_handshake_on_connect=False)
    link = Link(dialled)
    try:
        link.introduce(token, Member(info.name, rank), info.certificate, deadline)
    except LinkError:
        link.close()
        raise
    return link


def _proof(token: str, role: bytes, claim: bytes) -> bytes:
    return hmac.digest(token.encode(), role + b"\0" + claim, hashlib.sha256)


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise LinkError("not in time")
    return remaining


@contextlib.contextmanager
def _as_link_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise LinkError("not in time") from error
    except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
        raise LinkError(f"the connection broke: {error_reason(error)}") from error


def _slices(pieces: Iterable[Bytes]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), SLICE_BYTES):
            yield view[start : start + SLICE_BYTES]
