"""How a bucket gets to where a transfer takes it from, without a copy where there need be none.

From main memory to main memory what is sent are the tensors themselves, short ones put together once for all servers:
a piece costs each link a call of the network. A learner on a GPU copies into page-locked memory, or packs on the GPU
for NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from stage2_trainer.sync.transports.buckets import TensorMeta, bucket_bytes, pack, take
from stage2_trainer.sync.transports.protocol import Packed

Bucket = Sequence[TensorMeta]
Tensors = Iterator[tuple[str, torch.Tensor]]
Slot = torch.Tensor | None
"""The memory of a bucket on its way; None = that of its tensors."""
SHORT_BYTES = 2**19


class Packer:
    """A packer of tensors on `device` for transfers that take buckets from `staging`."""

    def __init__(self, device: torch.device, staging: torch.device) -> None:
        self._device = device
        self._staging = staging
        self._leaves_gpu = device.type == "cuda" and staging.type == "cpu"
        self._stream: Any = torch.cuda.Stream(device) if self._leaves_gpu else None

    def slots(self, plan: Sequence[Bucket], count: int) -> list[Slot]:
        """Make `count` slots that each hold any bucket of the plan (fewer where the plan has fewer buckets)."""
        needed = min(count, len(plan))
        if self._device.type == "cpu":
            return [None] * needed
        size = max(map(bucket_bytes, plan), default=0)
        return [
            torch.empty(size, dtype=torch.uint8, device=self._staging, pin_memory=self._leaves_gpu)
            for _ in range(needed)
        ]

    def pack(self, bucket: Bucket, tensors: Tensors, slot: Slot) -> Packed:
        """Take the bucket's tensors from the stream into a slot. Raises ValueError where the stream yields others."""
        if slot is None:
            return Packed(tuple(_joined(tensor for _, tensor in take(bucket, tensors))))
        if self._leaves_gpu:
            return Packed((pack(bucket, tensors, slot, self._copy_out),), self._stream.record_event())
        packed = pack(bucket, tensors, slot)
        return Packed((packed,), torch.cuda.current_stream(self._device).record_event())

    def _copy_out(self, place: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy over a stream of its own, while the next tensor is merged."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            place.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the same bytes, neighbours that are short copied together."""
    short: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        is_short = tensor.nbytes < SHORT_BYTES
        if is_short:
            short.append(tensor)
            size += tensor.nbytes
        if short and (not is_short or size >= SHORT_BYTES):
            yield torch.cat(short) if len(short) > 1 else short[0]
            short, size = [], 0
        if not is_short:
            yield tensor
    if short:
        yield torch.cat(short) if len(short) > 1 else short[0]
