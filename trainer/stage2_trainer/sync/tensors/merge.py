"""The learner's weights as a server must have them: named as in the HF checkpoint, adapters merged on the way out.

The live model is never merged: each merged tensor is computed when its turn comes, in float32, cast once, and dropped
(`merge_math`). So the base stays what it was, bit for bit, after any number of syncs. PEFT merges in place only, and
merging and unmerging bf16 weights changes a sixth of them in one cycle (huggingface/trl#6688); the end of this file,
which reads the layers of PEFT 0.21 from the inside, goes when PEFT can merge out of place.

    source = merged_weights(model)        # nothing is computed yet
    source.metadata()                     # names, dtypes and shapes of the tensors below
    state = dict(source)                  # name -> merged tensor, (out, in) for a linear layer, on the model's device

Weights that ZeRO-3 spreads over processes are gathered in buckets (`WeightAccess`). A parameter of DeepSpeed then has
its whole shape in `ds_shape`, and this process's part in `ds_tensor`; its own data is empty until it is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import Tensor, nn

from stage2_trainer.sync.tensors.announcement import DEFAULT_BUCKET_BYTES, TensorMeta, parts_of, plan_buckets
from stage2_trainer.sync.tensors.digest import fused_layer
from stage2_trainer.sync.tensors.merge_math import (
    Adapter,
    Change,
    TrainedRows,
    kept_share,
    served_weight,
)

T = TypeVar("T")

VISION_PREFIX = "model.visual."
SAVED_COPY = ".modules_to_save."  # PEFT's trained full copy of a module ...
ORIGINAL_COPY = ".original_module."  # ... and the frozen one that it replaces
BASE_LAYER = ".base_layer."
TOKEN_ADAPTER = ".token_adapter"  # between a table and the rows of it that train


class WeightAccess:
    """Access to weights that are whole in this process. bucket_bytes: limit of what is gathered, and sent, at once."""

    def __init__(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole until the next call, which releases them."""

    def compute(self, work: Callable[..., T], model: Any, *arguments: Any) -> T:
        """Return `work(model, *arguments)`, which runs the model's forward pass."""
        return work(model, *arguments)


HERE = WeightAccess()


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a parameter, gathered or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_part(parameter: Tensor) -> Tensor:
    """Return what this process keeps of a parameter between gathers."""
    found: Tensor = getattr(parameter, "ds_tensor", parameter)
    return found


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

    @property
    def frozen(self) -> bool:
        """Whether the parameter stays as it was loaded: it does not train, or an adapter trains in its place."""
        return self.change is not None or not self.trains

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters that it is made of."""
        return [self.parameter, *({} if self.change is None else parts_of(self.name, self.change)).values()]


@dataclass(frozen=True)
class WeightSource:
    """A re-iterable stream of `(name, tensor)`; `metadata()` describes beforehand what it yields.

    Iterating computes merged tensors one by one, and holds only the current one. rounding: see `rounding_for`.
    access: gathers parameters, a bucket at a time. kept: of the tensors that were merged, what `kept_share` needs.
    """

    entries: tuple[WeightEntry, ...] = field(repr=False)
    rounding: int | None = None
    access: WeightAccess = HERE
    kept: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    def metadata(self) -> list[TensorMeta]:
        """Return names, wire dtypes and shapes, in the order of iteration."""
        return [TensorMeta(e.name, e.parameter.dtype, whole_shape(e.parameter)) for e in self.entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        entries = iter(self.entries)
        for bucket in plan_buckets(self.metadata(), self.access.bucket_bytes):
            gathered = list(islice(entries, len(bucket)))
            self.access.gather([tensor for entry in gathered for tensor in entry.tensors])
            for entry in gathered:
                yield entry.name, self._served(entry)
        self.access.gather(())

    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(entry.name for entry in self.entries)

    def only(self, names: frozenset[str]) -> WeightSource:
        """Return the stream of these tensors alone, in the same order."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.name in names))

    def unmerged(self) -> WeightSource:
        """Return the stream of the weights under the adapters, as they are in the model folder."""
        return replace(self, entries=tuple(replace(entry, change=None) for entry in self.entries))

    def rounding_kept(self) -> float | None:
        """Return how much of the update of the tensors that were merged so far survives rounding."""
        return kept_share(self.kept)

    def _served(self, entry: WeightEntry) -> Tensor:
        if entry.change is None:
            return entry.parameter.detach()
        with torch.no_grad():
            return served_weight(entry.name, entry.parameter, entry.change, self.rounding, self.kept)


def merged_weights(model: nn.Module, *, rounding: int | None = None, access: WeightAccess = HERE) -> WeightSource:
    """Return the weights of `model` with its adapters merged, as a stream of (name, tensor).

    model: a plain transformers model, or a PEFT model with one LoRA or DoRA adapter; it is not changed.

    Names are those of the HF checkpoint; a tied `lm_head` is not sent (the checkpoint has none either).
    rounding: how merged weights are cast to the base's dtype. access: how they are read.

    Raises:
        TypeError: the model holds an adapter whose merge is not known here.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(base.named_modules())
    adapted = frozenset(name for name, one in modules.items() if isinstance(one, (LoraLayer, TrainableTokensLayer)))
    entries = [
        _entry(name, parameter, modules)
        for name, parameter in base.named_parameters()
        if ORIGINAL_COPY not in name and not _is_of_adapter(name, adapted)
    ]
    return WeightSource(tuple(entries), rounding, access)


def touches_vision(names: Iterable[str]) -> bool:
    """Whether new values of these tensors can change how the vision tower encodes an image."""
    return any(name.startswith(VISION_PREFIX) for name in names)


@dataclass(frozen=True)
class Stamp:
    """A parameter's state: torch counts every change in place, and a replaced storage has another address.

    Of a parameter that is spread over processes it is the state of this process's part, which a gather leaves alone.
    """

    parameter: weakref.ref[Tensor]
    address: int
    changes: int

    @classmethod
    def from_parameter(cls, parameter: Tensor) -> Stamp:
        """Return the parameter's state now."""
        return cls(weakref.ref(parameter), own_part(parameter).data_ptr(), own_part(parameter)._version)

    def still_describes(self, parameter: Tensor) -> bool:
        """Whether this is the parameter, and unchanged."""
        return (
            self.parameter() is parameter
            and self.address == own_part(parameter).data_ptr()
            and self.changes == own_part(parameter)._version
        )


Held = Mapping[str, Stamp]
"""The tensors that a server was sent, as they were then; none where nothing that it holds can be trusted."""


def held_after(source: WeightSource) -> Held:
    """Return what a server holds once it was sent all of `source`."""
    return {entry.name: Stamp.from_parameter(entry.parameter) for entry in source.entries}


def stale_names(held: Held, source: WeightSource) -> frozenset[str]:
    """Return what must be sent so that a server holds `source`: whole fused layers, at least what trains."""
    moved = {fused_layer(entry.name) for entry in source.entries if _may_differ(held.get(entry.name), entry)}
    return frozenset(entry.name for entry in source.entries if fused_layer(entry.name) in moved)


def _may_differ(stamp: Stamp | None, entry: WeightEntry) -> bool:
    return entry.trains or stamp is None or not stamp.still_describes(entry.parameter)


def _is_of_adapter(name: str, adapted: frozenset[str]) -> bool:
    """Whether a parameter is one of an adapter's own (`...q_proj.lora_A.default.weight`), below one of these layers."""
    if not adapted or BASE_LAYER in name:
        return False
    owner = name.rpartition(".")[0]
    while owner:
        if owner in adapted:
            return True
        owner = owner.rpartition(".")[0]
    return False


def _entry(name: str, parameter: Tensor, modules: dict[str, nn.Module]) -> WeightEntry:
    plain = WeightEntry(name, parameter, None, parameter.requires_grad)
    if SAVED_COPY in name:
        owner, rest = name.split(SAVED_COPY, 1)
        return replace(plain, name=f"{owner}.{rest.split('.', 1)[1]}")
    owner, separator, leaf = name.rpartition(BASE_LAYER)
    if not separator:
        return plain
    change = _change(owner, modules[owner])
    named = replace(plain, name=f"{owner.removesuffix(TOKEN_ADAPTER)}.{leaf}")
    return named if leaf != "weight" else replace(named, change=change, trains=True)


def _change(name: str, layer: nn.Module) -> Change:
    """Return the change of an adapted layer's weight. Raises TypeError where its merge is not known here."""
    change = _change_of_adapter(layer) if isinstance(layer, (TrainableTokensLayer, Linear, Embedding)) else None
    if change is None:
        raise TypeError(
            f"{name}: no merge is known for this adapter ({type(layer).__name__}); use one LoRA or DoRA adapter on"
            " linear layers, LoRA on embeddings, without lora_bias, or train the module in full (modules_to_save)"
        )
    return change


def _change_of_adapter(layer: Any) -> Change | None:
    if len(layer.active_adapters) != 1:
        return None
    (active,) = layer.active_adapters
    if isinstance(layer, TrainableTokensLayer):
        rows = layer.trainable_tokens_delta[active]  # called a difference, but these are the rows themselves
        return TrainedRows(layer.token_indices[active], rows)
    variant, scaling = layer.lora_variant.get(active), float(layer.scaling[active])
    embeds, linear = isinstance(layer, Embedding), isinstance(layer, Linear)
    if embeds and variant is None:
        # it adds s (B A)^T = s A^T B^T, its weight having shape (vocabulary, hidden)
        return Adapter(layer.lora_embedding_A[active].T, layer.lora_embedding_B[active].T, scaling)
    if not linear or layer.lora_bias[active] or not isinstance(variant, (DoraLinearVariant, type(None))):
        return None
    magnitude = None if variant is None else layer.lora_magnitude_vector[active].weight
    return Adapter(layer.lora_B[active].weight, layer.lora_A[active].weight, scaling, magnitude)
