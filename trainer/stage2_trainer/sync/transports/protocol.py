"""The terms of a push, on which both ends agree: the layout of buckets, and the group that carries them.

The layout is vLLM's own (vllm.distributed.weight_transfer.packed_tensor): tensors follow one another without padding,
and a bucket is closed as soon as it exceeds the limit. A tensor never splits, so a bucket may be larger than the limit
by almost one tensor.
"""

from __future__ import annotations

import math
import socket
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from stage2_api.vllm import TRANSPORT_PATH, Transport

INIT_ROUTE = "/init_weight_transfer_engine"
INIT_PHASE = "connect"
LEARNER_RANK = 0
DEFAULT_BUCKET_BYTES = 512 * 2**20
_MEMBER = struct.Struct("!16sI")
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor that is announced before it is sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_buckets(tensors: Iterable[TensorMeta], limit: int) -> Iterator[list[TensorMeta]]:
    """Group tensors, in order, into buckets that each end once their bytes exceed `limit`."""
    bucket: list[TensorMeta] = []
    size = 0
    for meta in tensors:
        bucket.append(meta)
        size += meta.nbytes
        if size > limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def bucket_bytes(bucket: Sequence[TensorMeta]) -> int:
    """Return the bytes of a bucket on the wire."""
    return sum(meta.nbytes for meta in bucket)


def take(
    bucket: Sequence[TensorMeta], tensors: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Take the bucket's tensors from the stream; yields each one's description and its bytes (uint8, flat).

    Raises:
        ValueError: the stream yields another tensor than the plan says. The receivers cut the bytes by the plan, so
            sending it would load garbage.
    """
    for meta in bucket:
        name, tensor = next(tensors, ("nothing", _NOTHING))
        if (name, tensor.dtype, tensor.shape) != (meta.name, meta.dtype, meta.shape):
            found = TensorMeta(name, tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"the weight stream yields {found}, but {meta} was announced")
        yield meta, tensor.detach().contiguous().view(-1).view(torch.uint8)


def pack(
    bucket: Sequence[TensorMeta],
    tensors: Iterator[tuple[str, torch.Tensor]],
    into: torch.Tensor,
    write: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.copy_,
) -> torch.Tensor:
    """Take the bucket's tensors from the stream and write them, one after the other, to the start of `into`.

    into: uint8, at least as long as the bucket. Fresh memory for each bucket would cost a page fault for every 4 KiB.
    write: copies a tensor's bytes into the buffer; both uint8, of one shape.
    Returns what was written, a view of shape (bytes,). Raises ValueError, as `take` does.
    """
    buffer = into[: bucket_bytes(bucket)]
    offset = 0
    for meta, tensor in take(bucket, tensors):
        end = offset + meta.nbytes
        write(buffer[offset:end], tensor)
        offset = end
    return buffer


def unpack(bucket: Sequence[TensorMeta], buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Cut a received buffer into its tensors: views where their alignment allows it, copies elsewhere."""
    tensors = []
    offset = 0
    for meta in bucket:
        piece = buffer[offset : offset + meta.nbytes]
        if offset % meta.dtype.itemsize:
            piece = piece.clone()
        tensors.append((meta.name, piece.view(meta.dtype).view(meta.shape)))
        offset += meta.nbytes
    return tensors


def to_wire(tensors: Iterable[TensorMeta]) -> dict[str, list[object]]:
    """Return tensors' descriptions in vLLM's terms (`update_info` of POST /update_weights)."""
    metas = list(tensors)
    return {
        "names": [meta.name for meta in metas],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
        "shapes": [list(meta.shape) for meta in metas],
    }


def from_wire(names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[TensorMeta]:
    """Read `to_wire`'s description back."""
    return [
        TensorMeta(name, getattr(torch, dtype_name), tuple(shape))
        for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True)
    ]


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
