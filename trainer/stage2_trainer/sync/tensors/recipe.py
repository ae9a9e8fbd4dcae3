"""The recipe by which a server makes weights from its own model folder and from what the learner has sent.

It travels as the header `merge` of an announcement (POST /update_weights), in one of two forms: what to make (nothing
where the learner has merged, or nothing is merged), or the digests that everything just loaded must have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge_math import Adapter, Change, TrainedRows
from stage2_trainer.sync.transports.protocol import to_wire

HEADER = "merge"
FOLDER_ROUTE = "/stage2/folder-digests"
MARK = "#"  # no name of a parameter has it
DIFFERS = "weights that were loaded here differ from the learner's"
"""The answer of a server whose digests are not those that were expected."""
UP, DOWN, MAGNITUDE, ROWS = "up", "down", "magnitude", "rows"


@dataclass(frozen=True)
class MadeTensor:
    """One tensor that a server makes.

    dtype: that of the learner's base weight. The folder's is cast to it before a merge, and the merged one after it.
    scaling: of the adapter that is merged into it; None = there is none. rows: which of its rows are replaced; None =
    none. With neither it is the folder's tensor as it is.
    """

    name: str
    dtype: str
    scaling: float | None = None
    rows: Sequence[int] | None = None

    @classmethod
    def from_change(cls, name: str, dtype: torch.dtype, change: Change | None) -> MadeTensor:
        """Return how a server makes a tensor that the learner changes so."""
        if isinstance(change, TrainedRows):
            return cls(name, dtype_name(dtype), rows=change.ids)
        return cls(name, dtype_name(dtype), None if change is None else change.scaling)


@dataclass(frozen=True)
class Recipe:
    """What a server makes, in the order in which it loads it. rounding: the version of `merge_math.Rounding`."""

    tensors: Sequence[MadeTensor]
    rounding: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the header."""
        return {HEADER: asdict(self)}

    @classmethod
    def from_wire(cls, header: Mapping[str, Any]) -> Recipe:
        """Read a header's value."""
        return cls([MadeTensor(**tensor) for tensor in header["tensors"]], header["rounding"])


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


def change_from(made: MadeTensor, parts: Mapping[str, Tensor]) -> Change | None:
    """Return the change whose parts have arrived; None where there is none. Raises KeyError if a part is missing."""
    sent = f"{made.name}{MARK}"
    if made.rows is not None:
        return TrainedRows(made.rows, parts[sent + ROWS])
    if made.scaling is None:
        return None
    return Adapter(parts[sent + UP], parts[sent + DOWN], made.scaling, parts.get(sent + MAGNITUDE))


def digested(tensors: Iterable[tuple[str, Tensor]], digests: Digests) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, and digest those that are loaded as they are (parts of a change are not)."""
    for name, tensor in tensors:
        if MARK not in name:
            digests.add(name, tensor)
        yield name, tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
