"""The recipe by which a server makes weights of its own model folder and of what the learner has sent.

It travels as the header `merge` of an announcement (POST /update_weights), in one of two forms: what to make (nothing
where the learner has merged, or nothing is merged), or the digests that everything just loaded must have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.merge_math import Adapter, Change, TrainedRows

HEADER = "merge"
MARK = "#"  # no name of a parameter has it
DIFFERS = "weights that were loaded here differ from the learner's"
"""What a server says whose digests are not those that were expected."""
UP, DOWN, MAGNITUDE, ROWS = "up", "down", "magnitude", "rows"


@dataclass(frozen=True)
class MadeTensor:
    """One tensor that a server makes.

    dtype: that of the learner's base weight. The folder's is cast to it before a merge, and the merged one after it.
    scaling: of the adapter that is merged into it, as the learner has it; None = there is none. rows: which of its rows
    are replaced; None = none are. With neither it is the folder's tensor as it is.
    """

    name: str
    dtype: str
    scaling: float | None = None
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Recipe:
    """What a server makes, in the order in which it loads it. rounding: the version of `rounding.Rounding`."""

    tensors: Sequence[MadeTensor]
    rounding: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return the header."""
        return {HEADER: asdict(self)}

    @classmethod
    def from_wire(cls, header: Mapping[str, Any]) -> Recipe:
        """Read a header's value."""
        return cls([MadeTensor(**tensor) for tensor in header["tensors"]], header["rounding"])


def expectation(layers: Mapping[str, str]) -> dict[str, Any]:
    """Return the header that asks a server whether it has loaded layers of these digests."""
    return {HEADER: {"expected": dict(layers)}}


def made_tensor(name: str, dtype: str, change: Change | None) -> MadeTensor:
    """Return how a tensor is made that the learner changes so."""
    if isinstance(change, TrainedRows):
        return MadeTensor(name, dtype, rows=change.ids)
    return MadeTensor(name, dtype, None if change is None else change.scaling)


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
    """Return the change whose parts have arrived; None where none is made. Raises KeyError for one that has not."""
    sent = f"{made.name}{MARK}"
    if made.rows is not None:
        return TrainedRows(made.rows, parts[sent + ROWS])
    if made.scaling is None:
        return None
    return Adapter(parts[sent + UP], parts[sent + DOWN], made.scaling, parts.get(sent + MAGNITUDE))


def noted(tensors: Iterable[tuple[str, Tensor]], digests: Digests) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on; digests take those that are loaded as they are, which parts of a change are not."""
    for name, tensor in tensors:
        if MARK not in name:
            digests.add(name, tensor)
        yield name, tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
