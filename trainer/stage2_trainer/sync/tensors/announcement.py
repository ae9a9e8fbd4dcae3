"""What a push announces, on which both ends agree: the layout of its buckets, and the recipe of what servers make.

The layout is vLLM's own (vllm.distributed.weight_transfer.packed_tensor): tensors follow one another without padding,
and a bucket is closed as soon as it exceeds the limit. A tensor never splits, so a bucket may be larger than the limit
by almost one tensor.

The recipe is how a server makes weights from its own model folder and from what the learner has sent. It travels as the
header `merge` of an announcement (POST /update_weights), in one of two forms: what to make (nothing where the learner
has merged, or nothing is merged), or the digests that everything just loaded must have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge_math import Adapter, Change, TrainedRows

DEFAULT_BUCKET_BYTES = 512 * 2**20
_NOTHING = torch.empty(0)

HEADER = "merge"
FOLDER_ROUTE = "/stage2/folder-digests"
MARK = "#"  # no name of a parameter has it
DIFFERS = "weights that were loaded here differ from the learner's"
"""The answer of a server whose digests are not those that were expected."""
UP, DOWN, MAGNITUDE, ROWS = "up", "down", "magnitude", "rows"


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


def made_tensor(name: str, dtype: torch.dtype, change: Change | None) -> dict[str, Any]:
    """Return how a server makes one tensor.

    dtype: that of the learner's base weight. The folder's is cast to it before a merge, and the merged one after it.
    scaling: of the adapter that is merged into it; None = there is none. rows: which of its rows are replaced; None =
    none. With neither it is the folder's tensor as it is.
    """
    scaling = change.scaling if isinstance(change, Adapter) else None
    rows = change.ids if isinstance(change, TrainedRows) else None
    return {"name": name, "dtype": dtype_name(dtype), "scaling": scaling, "rows": rows}


def recipe(tensors: Sequence[Mapping[str, Any]], rounding: int | None) -> dict[str, Any]:
    """Return the header: each `made_tensor`, in the order in which it is loaded. rounding: see `rounding_for`."""
    return {HEADER: {"tensors": tensors, "rounding": rounding}}


def digest_request(layers: Mapping[str, str]) -> str:
    """Return the announcement, as JSON text, that asks a server whether it has loaded layers of these digests."""
    return json.dumps({**to_wire([]), HEADER: {"expected": dict(layers)}})


def parts_of(name: str, change: Change) -> dict[str, Tensor]:
    """Return the tensors of a change under their names on the wire."""
    if isinstance(change, TrainedRows):
        parts = {ROWS: change.rows}
    else:
        parts = {UP: change.up, DOWN: change.down}
        if change.magnitude is not None:
            parts[MAGNITUDE] = change.magnitude
    return {f"{name}{MARK}{part}": tensor for part, tensor in parts.items()}


def change_from(made: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Change | None:
    """Return the change whose parts have arrived; None where there is none. Raises KeyError if a part is missing."""
    sent = f"{made['name']}{MARK}"
    if made["rows"] is not None:
        return TrainedRows(made["rows"], parts[sent + ROWS])
    if made["scaling"] is None:
        return None
    return Adapter(parts[sent + UP], parts[sent + DOWN], made["scaling"], parts.get(sent + MAGNITUDE))


def digested(tensors: Iterable[tuple[str, Tensor]], digests: Digests) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, and digest those that are loaded as they are (parts of a change are not)."""
    for name, tensor in tensors:
        if MARK not in name:
            digests.add(name, tensor)
        yield name, tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
