"""The versions of tensors that a server holds, and so need not be sent again."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor

from stage2_trainer.weights.fused import fused_layer
from stage2_trainer.weights.merge import WeightEntry, WeightSource


@dataclass(frozen=True)
class Stamp:
    """A parameter's state: torch counts every change in place, and a replaced storage has another address."""

    parameter: weakref.ref[Tensor]
    address: int
    changes: int

    @classmethod
    def of(cls, parameter: Tensor) -> Stamp:
        """Return the parameter's state now."""
        return cls(weakref.ref(parameter), parameter.data_ptr(), parameter._version)

    def still_describes(self, parameter: Tensor) -> bool:
        """Whether this is the parameter, and unchanged."""
        return (
            self.parameter() is parameter
            and self.address == parameter.data_ptr()
            and self.changes == parameter._version
        )


class HeldVersions:
    """The tensors that one server was sent, as they were then."""

    def __init__(self) -> None:
        self._stamps: dict[str, Stamp] = {}

    def stale_names(self, source: WeightSource) -> frozenset[str]:
        """Return what must be sent so that the server holds `source`: whole fused layers, at least what trains."""
        moved = {fused_layer(entry.name) for entry in source.entries if self._may_differ(entry)}
        return frozenset(entry.name for entry in source.entries if fused_layer(entry.name) in moved)

    def record(self, source: WeightSource) -> None:
        """Note that the server now holds all of `source`."""
        self._stamps = {entry.name: Stamp.of(entry.parameter) for entry in source.entries}

    def forget(self) -> None:
        """Trust nothing of what the server holds."""
        self._stamps = {}

    def _may_differ(self, entry: WeightEntry) -> bool:
        stamp = self._stamps.get(entry.name)
        return entry.trains or stamp is None or not stamp.still_describes(entry.parameter)
