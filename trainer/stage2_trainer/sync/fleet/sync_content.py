"""The content of a sync for a server: all by the wire, or a part of it made by the server of its own model folder."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from stage2_trainer.sync.fleet.fleet import Shipment
from stage2_trainer.sync.fleet.server_recipe import MadeTensor, Recipe, dtype_name, made_tensor, parts_of
from stage2_trainer.sync.tensors.digest import Digests
from stage2_trainer.sync.tensors.folder_proof import FolderProof, is_frozen
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource


@dataclass(frozen=True)
class SyncContent:
    """The tensors that a server shall hold, and those of them that it makes itself.

    source: all of them. made: the names of the latter; none where the learner merges. digests: of what has been sent
    whole, and noted of what is made.
    """

    source: WeightSource
    made: frozenset[str] = frozenset()
    digests: Digests = field(default_factory=Digests, repr=False)

    def shipment(self) -> Shipment:
        """Return what is sent; while it is packed, the digests take what is sent whole."""
        made = [entry for entry in self.source.entries if entry.name in self.made]
        sent = [part for entry in made for part in _parts(entry)]
        sent += [entry for entry in self.source.entries if entry.name not in self.made]
        recipe = Recipe([_made(entry) for entry in made], self.source.rounding.version)
        return Shipment(replace(self.source, entries=tuple(sent)), recipe.to_wire(), self.digests)

    @torch.no_grad()
    def note_made(self) -> None:
        """Let the digests take what the server makes: each tensor is merged here too, and forgotten."""
        for name, tensor in self.source.only(self.made):
            self.digests.add(name, tensor)

    def expected(self) -> dict[str, str]:
        """Return the digest of each layer that the server must have loaded; a tensor that was not sent is missed."""
        return self.digests.of_layers(self.source.names())


def made_by_server(source: WeightSource, proof: FolderProof) -> frozenset[str]:
    """Return the names of what a server can make of its folder and of adapters."""
    return frozenset(entry.name for entry in source.entries if is_frozen(entry) and proof.covers(entry))


def _parts(entry: WeightEntry) -> list[WeightEntry]:
    if entry.change is None:
        return []
    parts = parts_of(entry.name, entry.change)
    return [WeightEntry(name, tensor, None, trains=True) for name, tensor in parts.items()]


def _made(entry: WeightEntry) -> MadeTensor:
    return made_tensor(entry.name, dtype_name(entry.parameter.dtype), entry.change)
