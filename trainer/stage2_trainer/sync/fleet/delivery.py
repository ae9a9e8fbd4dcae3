"""The delivery of tensors: packed into buckets, each of which a thread for every server sends, out of a few slots.

A slot is filled again once every server has been sent its bucket. So memory is that of the slots, however many servers
there are, and a server that takes nothing delays the others by no more than its own deadline: then it is given up, and
its slots are free.

From main memory to main memory the tensors themselves are sent, short ones joined once for all servers: each piece
costs every link a system call. A learner on a GPU copies into page-locked memory, or packs on the GPU for NCCL.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from stage2_trainer.process.background import in_background
from stage2_trainer.sync.fleet.retries import ANSWER_GRACE_S
from stage2_trainer.sync.tensors.announcement import (
    TensorMeta,
    bucket_bytes,
    digest_request,
    digested,
    made_tensor,
    pack,
    parts_of,
    recipe,
    take,
    to_wire,
)
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource
from stage2_trainer.sync.transports.transfer import Packed, WeightTransfer
from stage2_trainer.wire.errors import LinkError, ServerError

SHORT_BYTES = 2**19
SLOTS = 2  # one bucket is on its way while the next is merged

Bucket = Sequence[TensorMeta]
Tensors = Iterator[tuple[str, torch.Tensor]]
Slot = torch.Tensor | None
"""The memory of a bucket on its way; None = that of its tensors."""


@dataclass(frozen=True)
class Shipment:
    """The tensors that are sent to servers that need the same.

    source: what is sent. header: what the announcement has beside names, dtypes and shapes. made: what the servers make
    of it and of their own model folder; the learner makes it too, for its digest. names: what the servers must hold
    after it. digests: those of the push so far, by which that is compared; None = it is not.
    """

    source: WeightSource
    header: Mapping[str, Any] = field(default_factory=dict)
    made: WeightSource | None = None
    names: frozenset[str] = frozenset()
    digests: Digests | None = None

    @classmethod
    def for_servers(cls, source: WeightSource, merged_there: frozenset[str], digests: Digests) -> Shipment:
        """Return the shipment after which servers hold `source`.

        They merge `merged_there` of it from adapter parts and their own model folder, and get the rest merged.
        digests: of all shipments of the push.
        """
        made, whole = source.only(merged_there), source.only(source.names() - merged_there)
        parts = [part for entry in made.entries for part in _parts(entry)]
        tensors = [made_tensor(e.name, e.parameter.dtype, e.change) for e in made.entries]
        header = recipe(tensors, source.rounding)
        sent = replace(source, entries=(*parts, *whole.entries))
        return cls(sent, header, made, source.names(), digests)

    @cached_property
    def metas(self) -> list[TensorMeta]:
        """The descriptions of the tensors, in order."""
        return self.source.metadata()

    @property
    def nbytes(self) -> int:
        """Bytes that each server is sent."""
        return bucket_bytes(self.metas)

    @property
    def announcement(self) -> str:
        """JSON text that describes the tensors to a server before they are sent."""
        return json.dumps({**to_wire(self.metas), **self.header})

    def tensors(self) -> Tensors:
        """Yield the tensors, in order, each computed when its turn comes; `digests` take those that are sent whole."""
        return iter(self.source) if self.digests is None else digested(self.source, self.digests)

    @torch.no_grad()
    def digest_what_servers_merge(self) -> None:
        """Digest what the servers make: each tensor is merged here too, once in a push, and dropped."""
        if self.made is not None and self.digests is not None:
            for name, tensor in self.made.only(self.made.names() - self.digests.names()):
                self.digests.add(name, tensor)

    def digest_request(self) -> str | None:
        """Return the request by which a server compares what it has loaded; a tensor that was not sent is missed.

        Call it once all is sent, and digested.
        """
        return None if self.digests is None else digest_request(self.digests.by_layer(self.names))


class Packer:
    """A packer of tensors on `device` for transfers that read buckets from `staging`."""

    def __init__(self, device: torch.device, staging: torch.device) -> None:
        self._device = device
        self._staging = staging
        self._leaves_gpu = device.type == "cuda" and staging.type == "cpu"
        self._stream: Any = torch.cuda.Stream(device) if self._leaves_gpu else None

    def slots(self, plan: Sequence[Bucket], count: int) -> list[Slot]:
        """Create `count` slots that each hold any bucket of the plan (fewer where the plan has fewer buckets)."""
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


class Delivery:
    """One server's part in a push: threads that send it bucket after bucket.

    call: the server's own call, which ends when it has loaded everything.
    """

    def __init__(self, server: str, transfer: WeightTransfer, call: Future[Any]) -> None:
        self.failure: LinkError | None = None
        self._server = server
        self._transfer = transfer
        self._call = call
        self._sent_at = time.monotonic()
        self._last: Future[None] | None = None

    def send(self, bucket: Bucket, packed: Packed) -> Future[None]:
        """Send a bucket after those before it; the future ends when it is sent, or given up."""
        self._last = in_background(self._send_after, self._last, bucket, packed)
        return self._last

    def wait(self) -> None:
        """Wait until everything is sent, or given up."""
        if self._last is not None:
            self._last.result()

    def confirm(self, timeout_s: float) -> None:
        """Wait until the server reports that it has taken everything, up to `timeout_s` after it was sent the last.

        Call it after `wait`.

        Raises:
            ServerError: it has not. The server's own report comes first: it explains more than a broken link.
        """
        patience = ANSWER_GRACE_S if self.failure else max(0.0, self._sent_at + timeout_s - time.monotonic())
        try:
            self._call.result(timeout=patience)
        except TimeoutError as error:
            late = f"all tensors sent, but not confirmed within {timeout_s:g} s"
            raise ServerError(self._server, "push", str(self.failure or late)) from error
        if self.failure is not None:
            raise ServerError(self._server, "push", str(self.failure)) from self.failure

    def _send_after(self, before: Future[None] | None, bucket: Bucket, packed: Packed) -> None:
        if before is not None:
            before.result()
        if self.failure is None:
            try:
                self._transfer.send(packed)
            except Exception as error:  # noqa: BLE001  # raised by `confirm`
                self.failure = LinkError(f"tensors {bucket[0].name} to {bucket[-1].name}: {error}")
        self._sent_at = time.monotonic()


def _parts(entry: WeightEntry) -> list[WeightEntry]:
    parts = {} if entry.change is None else parts_of(entry.name, entry.change)
    return [WeightEntry(name, tensor, None, trains=True) for name, tensor in parts.items()]


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
