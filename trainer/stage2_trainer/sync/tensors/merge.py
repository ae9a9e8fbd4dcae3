"""The learner's weights as a server must have them: named as in the HF checkpoint, adapters merged on the way out.

The live model is never merged: each tensor's merged value is computed when its turn comes, in float32, cast once, and
forgotten (`merge_math`, `rounding`). So the base stays what it was, bit for bit, after any number of syncs.

    source = merged_weights(model)        # nothing is computed yet
    source.metadata()                     # names, dtypes and shapes, as the tensors below will have them
    state = dict(source)                  # name -> merged tensor, (out, in) for a linear layer, on the model's device
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from peft import PeftModel
from torch import Tensor, nn

from stage2_trainer.sync.tensors.merge_math import Change
from stage2_trainer.sync.tensors.peft_compat import (
    BASE_LAYER,
    ORIGINAL_COPY,
    SAVED_COPY,
    TOKEN_ADAPTER,
    adapted_layers,
    change_of,
    is_adapter,
)
from stage2_trainer.sync.tensors.rounding import NEAREST, KeptUpdate, Rounding, served_weight
from stage2_trainer.sync.transports.buckets import TensorMeta

VISION_PREFIX = "model.visual."


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of a stream.

    name: that of the checkpoint. parameter: the weight itself, or the one below the adapter. change: what is merged
    into it. trains: whether an optimizer step can change it.
    """

    name: str
    parameter: Tensor
    change: Change | None
    trains: bool


@dataclass(frozen=True)
class WeightSource:
    """A re-iterable stream of `(name, tensor)` whose `metadata()` says beforehand what it will yield.

    Iterating computes merged tensors one by one; nothing but the tensor in hand is held. kept: learns of each merged
    tensor what rounding leaves of its update.
    """

    entries: tuple[WeightEntry, ...] = field(repr=False)
    rounding: Rounding = NEAREST
    kept: KeptUpdate | None = None

    def metadata(self) -> list[TensorMeta]:
        """Return names, wire dtypes and shapes, in the order of iteration."""
        return [TensorMeta(e.name, e.parameter.dtype, tuple(e.parameter.shape)) for e in self.entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self.entries:
            yield entry.name, self._served(entry)

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(entry.name for entry in self.entries)

    def only(self, names: frozenset[str]) -> WeightSource:
        """Return the stream of these tensors alone, in the same order."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.name in names))

    def _served(self, entry: WeightEntry) -> Tensor:
        if entry.change is None:
            return entry.parameter.detach()
        with torch.no_grad():
            return served_weight(entry.name, entry.parameter, entry.change, self.rounding, self.kept)


def touches_vision(names: Iterable[str]) -> bool:
    """Whether new values of these tensors can change what the vision tower makes of an image."""
    return any(name.startswith(VISION_PREFIX) for name in names)


def base_weights(model: nn.Module) -> WeightSource:
    """Return the weights under the adapters of `model`, as they are in the model directory."""
    merged = merged_weights(model)
    return replace(merged, entries=tuple(replace(entry, change=None) for entry in merged.entries))


def merged_weights(model: nn.Module, *, rounding: Rounding = NEAREST, kept: KeptUpdate | None = None) -> WeightSource:
    """Return the weights of `model` with its adapters merged, as a stream of (name, tensor).

    model: a plain transformers model, or a PEFT model with one LoRA or DoRA adapter; it is not changed.

    Names are those of the HF checkpoint; a tied `lm_head` is not sent (the checkpoint has none either).
    rounding, kept: how merged weights are cast to the base's dtype, and what learns how much of their update is left.

    Raises:
        TypeError: the model holds an adapter whose merge is not known here.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(base.named_modules())
    adapted = adapted_layers(modules)
    entries = [
        _entry(name, parameter, modules)
        for name, parameter in base.named_parameters()
        if ORIGINAL_COPY not in name and not is_adapter(name, adapted)
    ]
    return WeightSource(entries=tuple(entries), rounding=rounding, kept=kept)


def _entry(name: str, parameter: Tensor, modules: dict[str, nn.Module]) -> WeightEntry:
    plain = WeightEntry(name, parameter, None, parameter.requires_grad)
    if SAVED_COPY in name:
        owner, rest = name.split(SAVED_COPY, 1)
        return replace(plain, name=f"{owner}.{rest.split('.', 1)[1]}")
    owner, separator, leaf = name.rpartition(BASE_LAYER)
    if not separator:
        return plain
    change = change_of(owner, modules[owner])
    named = replace(plain, name=f"{owner.removesuffix(TOKEN_ADAPTER)}.{leaf}")
    return named if leaf != "weight" else replace(named, change=change, trains=True)
