"""The learner's weights as a server must have them: named as in the HF checkpoint, adapters merged on the way out.

The live model is never merged: each tensor's merged value is computed when its turn comes, in float32, cast once, and
forgotten. So the base stays what it was, bit for bit, after any number of syncs. (Merging bf16 weights in place and
unmerging them again changes a sixth of them in one cycle: huggingface/trl issue 6688.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from stage2_trainer.wire.buckets import TensorMeta

VISION_PREFIX = "model.visual."
SAVED_COPY = ".modules_to_save."  # PEFT's trained full copy of a module ...
ORIGINAL_COPY = ".original_module."  # ... and the frozen one that it replaces
BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class WeightEntry:
    """One tensor to send.

    name: that of the checkpoint. merged: computes the value in float32 where it is not the parameter's own.
    trains: whether an optimizer step can change it.
    """

    name: str
    parameter: Tensor
    merged: Callable[[], Tensor] | None
    trains: bool


@dataclass(frozen=True)
class WeightSource:
    """A re-iterable stream of `(name, tensor)` whose `metadata()` says beforehand what it will yield.

    Iterating computes merged tensors one by one; nothing but the tensor in hand is held.
    """

    entries: tuple[WeightEntry, ...] = field(repr=False)
    dtype: torch.dtype | None = None

    def metadata(self) -> list[TensorMeta]:
        """Names, wire dtypes and shapes, in the order of iteration."""
        return [TensorMeta(e.name, self._wire_dtype(e), tuple(e.parameter.shape)) for e in self.entries]

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for entry in self.entries:
            value = entry.parameter if entry.merged is None else entry.merged()
            yield entry.name, value.detach().to(self._wire_dtype(entry))

    def names(self) -> frozenset[str]:
        """All tensors."""
        return frozenset(entry.name for entry in self.entries)

    def trained_names(self) -> frozenset[str]:
        """The tensors that an optimizer step can change."""
        return frozenset(entry.name for entry in self.entries if entry.trains)

    def only(self, names: frozenset[str]) -> WeightSource:
        """Return the stream of these tensors alone, in the same order."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry.name in names))

    def _wire_dtype(self, entry: WeightEntry) -> torch.dtype:
        own = entry.parameter.dtype
        return own if self.dtype is None or not own.is_floating_point else self.dtype


def touches_vision(names: Iterable[str]) -> bool:
    """Whether new values of these tensors can change what the vision tower makes of an image."""
    return any(name.startswith(VISION_PREFIX) for name in names)


def base_weights(model: nn.Module) -> WeightSource:
    """Describe the weights under the adapters of `model`, as they are in the model directory."""
    merged = merged_weights(model)
    return replace(merged, entries=tuple(replace(entry, merged=None) for entry in merged.entries))


def merged_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> WeightSource:
    """Describe what to send of `model` (a plain model, or a PEFT model with LoRA or DoRA adapters).

    Names are those of the HF checkpoint; a tied `lm_head` is not sent (the checkpoint has none either).
    `dtype` is what floating-point tensors are cast to on the wire (default: each its own).

    Raises:
        TypeError: the model holds an adapter whose merge is not known here.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    modules = dict(base.named_modules())
    entries = [
        _entry(name, parameter, modules)
        for name, parameter in base.named_parameters()
        if ORIGINAL_COPY not in name and not _is_adapter(name, modules)
    ]
    return WeightSource(entries=tuple(entries), dtype=dtype)


def _is_adapter(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a parameter is one of an adapter's own (`...q_proj.lora_A.default.weight`)."""
    parts = name.split(".")
    owners = (".".join(parts[:i]) for i in range(1, len(parts)))
    return BASE_LAYER not in name and any(isinstance(modules[owner], LoraLayer) for owner in owners)


def _entry(name: str, parameter: Tensor, modules: dict[str, nn.Module]) -> WeightEntry:
    if SAVED_COPY in name:
        owner, rest = name.split(SAVED_COPY, 1)
        return WeightEntry(f"{owner}.{rest.split('.', 1)[1]}", parameter, None, parameter.requires_grad)
    owner, separator, leaf = name.rpartition(BASE_LAYER)
    if not separator:
        return WeightEntry(name, parameter, None, parameter.requires_grad)
    merge = _merge(owner, modules[owner])
    if leaf != "weight":
        return WeightEntry(f"{owner}.{leaf}", parameter, None, parameter.requires_grad)
    return WeightEntry(f"{owner}.{leaf}", parameter, merge, trains=True)


def _merge(name: str, layer: nn.Module) -> Callable[[], Tensor]:
    """Return what computes the merged weight of an adapted layer."""
    if isinstance(layer, (Linear, Embedding)) and len(layer.active_adapters) == 1:
        adapter = layer.active_adapters[0]
        variant = layer.lora_variant.get(adapter)
        if isinstance(layer, Linear) and not layer.lora_bias[adapter]:
            if variant is None:
                return lambda: _linear_lora(layer, adapter)
            if isinstance(variant, DoraLinearVariant):
                return lambda: _linear_dora(layer, adapter)
        if isinstance(layer, Embedding) and variant is None:
            return lambda: _embedding_lora(layer, adapter)
    raise TypeError(
        f"{name}: no merge is known for this adapter ({type(layer).__name__}); use one LoRA or DoRA adapter on linear"
        " layers, LoRA on embeddings, without lora_bias, or train the module in full (modules_to_save)"
    )


def _linear_lora(layer: Any, adapter: str) -> Tensor:
    """W + s B A in float32, shape (out, in) (LoRA: arXiv 2106.09685)."""
    down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
    merged: Tensor = layer.get_base_layer().weight.float() + (up @ down) * layer.scaling[adapter]
    return merged


def _linear_dora(layer: Any, adapter: str) -> Tensor:
    """m (W + s B A) / ||W + s B A||, norms by output row, in float32, shape (out, in) (DoRA: arXiv 2402.09353)."""
    direction = _linear_lora(layer, adapter)
    magnitude = layer.lora_magnitude_vector[adapter].weight.float()
    merged: Tensor = (magnitude / torch.linalg.norm(direction, dim=1)).unsqueeze(1) * direction
    return merged


def _embedding_lora(layer: Any, adapter: str) -> Tensor:
    """W + s (B A)^T in float32, shape (vocabulary, hidden)."""
    down, up = layer.lora_embedding_A[adapter].float(), layer.lora_embedding_B[adapter].float()
    merged: Tensor = layer.get_base_layer().weight.float() + (up @ down).T * layer.scaling[adapter]
    return merged
