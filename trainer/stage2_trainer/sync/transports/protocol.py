"""The group that a learner forms with the workers of a server, as both ends describe it."""

from __future__ import annotations

import socket
import struct
import uuid
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from stage2_api.vllm import TRANSPORT_PATH, Transport

LEARNER_RANK = 0
_MEMBER = struct.Struct("!16sI")


@dataclass(frozen=True)
class Member:
    """A worker's place: the group that the learner has announced to its server, and its rank there."""

    group: str
    rank: int
    SIZE: ClassVar[int] = _MEMBER.size

    def to_bytes(self) -> bytes:
        """Return the form that crosses, of fixed size."""
        return _MEMBER.pack(uuid.UUID(self.group).bytes, self.rank)

    @classmethod
    def from_bytes(cls, data: bytes) -> Member:
        """Read `to_bytes` back; any bytes of that size are a member of some group."""
        group, rank = _MEMBER.unpack(data)
        return cls(uuid.UUID(bytes=group).hex, rank)


@dataclass
class GroupInfo:
    """The group to join, and the place in it: the `init_info` of POST /init_weight_transfer_engine.

    rank_offset: rank of the server's first worker; workers of other servers may have the ranks around its own.
    packed_buffer_size_bytes: bucket limit (see `buckets`).
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

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON object that the server is sent."""
        return asdict(self)

    def members(self, workers: int) -> list[Member]:
        """Return the places of the server's workers, by rank."""
        return [Member(self.name, self.rank_offset + number) for number in range(workers)]

    def require(self, transport: Transport) -> None:
        """Raise ValueError where the learner sends over another transport than this server receives over."""
        if self.transport != transport:
            raise ValueError(
                f"the learner sends weights over {self.transport} and this server receives them over {transport}:"
                f" give both the same {TRANSPORT_PATH}"
            )


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


INIT_ROUTE = "/init_weight_transfer_engine"
INIT_PHASE = "connect"
