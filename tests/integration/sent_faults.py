"""Faults between what a learner notes of its tensors and what it sends: the negative controls of its digests."""

import dataclasses

import pytest
import torch

from stage2_trainer.sync.fleet.delivery import Packer, Shipment
from stage2_trainer.sync.tensors.merge import merged_weights

LAYER = "layers.1.mlp.down_proj"
OTHER = "layers.0.mlp.down_proj"


def wrong(monkeypatch, before, policy):
    """One bit of one tensor is another."""

    def change(name, tensor):
        if LAYER not in name:
            return tensor
        changed = tensor.contiguous().clone()
        changed.view(torch.uint8).view(-1)[7] ^= 1
        return changed

    packs(monkeypatch, change)


def lost(monkeypatch, before, policy):
    """A layer is not sent at all."""
    honest = Shipment.for_servers

    def shipment(source, *others):
        whole = honest(source, *others)
        kept = tuple(entry for entry in whole.source.entries if LAYER not in entry.name)
        return dataclasses.replace(whole, source=dataclasses.replace(whole.source, entries=kept))

    monkeypatch.setattr(Shipment, "for_servers", shipment)


def unmerged(monkeypatch, before, policy):
    """A layer is sent as it was before it trained."""
    old = dict(merged_weights(before))
    packs(monkeypatch, lambda name, tensor: old[name] if LAYER in name else tensor)


def permuted(monkeypatch, before, policy):
    """Two layers are sent under each other's names."""
    new = dict(merged_weights(policy))

    def change(name, tensor):
        if LAYER in name:
            return new[name.replace(LAYER, OTHER)]
        return new[name.replace(OTHER, LAYER)] if OTHER in name else tensor

    packs(monkeypatch, change)


FAULTS = {fault.__name__: fault for fault in (wrong, lost, unmerged, permuted)}


def packs(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Let other tensors be packed than those that were noted; `change` makes them of a name and a tensor."""
    honest = Packer.pack

    def pack(self, bucket, tensors, slot):
        return honest(self, bucket, ((name, change(name, tensor)) for name, tensor in tensors), slot)

    monkeypatch.setattr(Packer, "pack", pack)
