"""The recipe by which a server makes weights of its own model folder and of what the learner has sent.

It travels as the header `merge` of an announcement (POST /update_weights), in one of two forms: what to make, or the
digests that everything just loaded must have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from stage2_trainer.weights.merge_math import Adapter

HEADER = "merge"
MARK = "#"  # no name of a parameter has it
UP, DOWN, MAGNITUDE = "up", "down", "magnitude"


@dataclass(frozen=True)
class MadeTensor:
    """One tensor that a server makes.

    dtype: that of the learner's base weight. The folder's is cast to it before a merge, and the merged one after it.
    scaling: of the adapter that is merged into it, as the learner has it; None = the folder's tensor as it is.
    """

    name: str
    dtype: str
    scaling: float | None = None


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


def parts_of(name: str, adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors of an adapter under their names on the wire."""
    parts = {UP: adapter.up, DOWN: adapter.down}
    if adapter.magnitude is not None:
        parts[MAGNITUDE] = adapter.magnitude
    return {f"{name}{MARK}{part}": tensor for part, tensor in parts.items()}


def adapter_from(name: str, scaling: float, parts: Mapping[str, Tensor]) -> Adapter:
    """Return the adapter whose parts have arrived. Raises KeyError for one that has not."""
    up, down = parts[f"{name}{MARK}{UP}"], parts[f"{name}{MARK}{DOWN}"]
    return Adapter(up, down, scaling, parts.get(f"{name}{MARK}{MAGNITUDE}"))


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")
