"""The versions of tensors that servers hold, and so need not be sent again."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from stage2_trainer.sync.tensors.fused import fused_layer
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource


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
    """The tensors that servers were sent, as they were then; none of them where nothing they hold can be trusted."""

    def __init__(self, stamps: Mapping[str, Stamp] | None = None) -> None:
        self._stamps = stamps or {}

    @classmethod
    def of(cls, source: WeightSource) -> HeldVersions:
        """Return what servers hold that were brought all of `source`."""
        return cls({entry.name: Stamp.of(entry.parameter) for entry in source.entries})

    def stale_names(self, source: WeightSource) -> frozenset[str]:
        """Return what must be sent so that a server holds `source`: whole fused layers, at least what trains."""
        moved = {fused_layer(entry.name) for entry in source.entries if self._may_differ(entry)}
        return frozenset(entry.name for entry in source.entries if fused_layer(entry.name) in moved)

    def _may_differ(self, entry: WeightEntry) -> bool:
        stamp = self._stamps.get(entry.name)
        return entry.trains or stamp is None or not stamp.still_describes(entry.parameter)
