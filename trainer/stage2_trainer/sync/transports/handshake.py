"""The handshake of a link: learner and worker prove to each other that they hold the job's token, and neither shows it.

    learner                                  worker
       magic, share                    ->
                                       <-    group, rank, share, HMAC(token, "worker" + all of it)
       HMAC(token, "learner" + all of it) ->      only if that group waits for that rank

A share is a public key of X25519 that is made for this handshake and used in no other, so a recorded handshake proves
nothing; each side's proof begins with its own role, so none can be sent back to whom it came from. Who dials proves
first: a stranger who dials is told nothing that depends on the token. Messages have one size each, and nothing in them
is parsed but a number. The keys of the link come out of both shares, the token and the same messages, so what is sent
later belongs to this handshake and to no other, and who records it and learns the token afterwards still cannot read
it: the private halves are gone.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from stage2_trainer.sync.transports.connection import Connection
from stage2_trainer.wire.errors import LinkError

MAGIC = b"stage2 link 2\0\0\0"
SHARE_BYTES = PROOF_BYTES = KEY_BYTES = 32
_MEMBER = struct.Struct("!16sI")
CHALLENGE_BYTES = len(MAGIC) + SHARE_BYTES
CLAIM_BYTES = _MEMBER.size + SHARE_BYTES + PROOF_BYTES
LEARNER, WORKER = b"learner", b"worker"


@dataclass(frozen=True)
class Member:
    """A worker's place: the group that the learner has announced to its server, and its rank there."""

    group: str
    rank: int

    def to_bytes(self) -> bytes:
        """Return the fixed-size form that crosses."""
        return _MEMBER.pack(uuid.UUID(self.group).bytes, self.rank)

    @classmethod
    def from_bytes(cls, data: bytes) -> Member:
        """Read `to_bytes` back; any bytes of that size are a member of some group."""
        group, rank = _MEMBER.unpack(data)
        return cls(uuid.UUID(bytes=group).hex, rank)


@dataclass(frozen=True)
class SessionKeys:
    """The keys of one link, one for each direction."""

    of_learner: bytes
    of_worker: bytes


def admit(
    connection: Connection, token: str, is_expected: Callable[[Member], bool], deadline: float
) -> tuple[Member, SessionKeys]:
    """Let whoever has dialled prove itself, and prove this side to whom it expects; on the learner.

    Raises:
        LinkError: it has not the token, is not expected, speaks otherwise, or is too slow.
    """
    own = X25519PrivateKey.generate()
    challenge = MAGIC + own.public_key().public_bytes_raw()
    connection.send(challenge, deadline)
    claim = connection.receive(CLAIM_BYTES, deadline)
    transcript, proof = challenge + claim[:-PROOF_BYTES], claim[-PROOF_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, WORKER, transcript)):
        raise LinkError("the other side does not prove the job's token")
    member = Member.from_bytes(claim[: _MEMBER.size])
    if not is_expected(member):
        raise LinkError("the other side is called for by nobody: its group was given up")
    keys = _keys(token, transcript, own, claim[_MEMBER.size : -PROOF_BYTES])
    connection.send(_proof(token, LEARNER, transcript), deadline)
    return member, keys


def introduce(connection: Connection, token: str, member: Member, deadline: float) -> SessionKeys:
    """Prove this side to the learner, and let it prove itself; on a worker.

    Raises:
        LinkError: the other side is no learner with the token, or is too slow.
    """
    challenge = connection.receive(CHALLENGE_BYTES, deadline)
    if not challenge.startswith(MAGIC):
        raise LinkError("what listens there is no learner of this version of stage2")
    own = X25519PrivateKey.generate()
    transcript = challenge + member.to_bytes() + own.public_key().public_bytes_raw()
    connection.send(transcript[CHALLENGE_BYTES:] + _proof(token, WORKER, transcript), deadline)
    if not hmac.compare_digest(connection.receive(PROOF_BYTES, deadline), _proof(token, LEARNER, transcript)):
        raise LinkError("what listens there does not prove the job's token")
    return _keys(token, transcript, own, challenge[len(MAGIC) :])


def _proof(token: str, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(token.encode(), role + b"\0" + transcript, hashlib.sha256)


def _keys(token: str, transcript: bytes, own: X25519PrivateKey, share: bytes) -> SessionKeys:
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError as error:  # of the few shares with which every secret is the same
        raise LinkError("the other side's share is none") from error
    derived = HKDF(SHA256(), 2 * KEY_BYTES, salt=None, info=b"keys\0" + transcript).derive(secret + token.encode())
    return SessionKeys(derived[:KEY_BYTES], derived[KEY_BYTES:])
