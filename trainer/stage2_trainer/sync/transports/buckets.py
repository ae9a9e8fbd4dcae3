"""Tensors packed into buckets of bytes: the layout that both ends of a push agree on.

The rule is vLLM's own (vllm.distributed.weight_transfer.packed_tensor), so that one sender serves vLLM's nccl engine
and our own: tensors follow one another without padding, and a bucket is closed as soon as it exceeds the limit.
A tensor never splits, so a bucket may be larger than the limit by almost one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

DEFAULT_BUCKET_BYTES = 512 * 2**20
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


def copy(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes to their place in a bucket."""
    place.copy_(tensor)


def pack(
    bucket: Sequence[TensorMeta],
    tensors: Iterator[tuple[str, torch.Tensor]],
    into: torch.Tensor,
    write: Callable[[torch.Tensor, torch.Tensor], None] = copy,
) -> torch.Tensor:
    """Take the bucket's tensors from the stream and write them, one after the other, to the start of `into`.

    into: uint8, at least as long as the bucket. Fresh memory for each bucket would cost a page fault for every 4 KiB.
    write: how a tensor's bytes get to their place; both uint8, of one shape.
    Returns what was written, a view of shape (bytes,). Raises ValueError, as `take` does.
    """
    buffer = into[: bucket_bytes(bucket)]
    offset = 0
    for meta, tensor in take(bucket, tensors):
        end = offset + meta.nbytes
        write(buffer[offset:end], tensor)
        offset = end
    return buffer


def buffers_for(plan: Sequence[Sequence[TensorMeta]], device: torch.device, count: int) -> list[torch.Tensor]:
    """Make `count` uint8 buffers that each hold any bucket of the plan (fewer where the plan has fewer buckets)."""
    size = max(map(bucket_bytes, plan), default=0)
    return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(min(count, len(plan)))]


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
