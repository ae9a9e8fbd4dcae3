"""PEFT 0.21's adapted layers, read from the inside: their names, and the tensors of one.

PEFT merges in place only, and merging bf16 weights and unmerging them again changes a sixth of them in one cycle
(huggingface/trl#6688). Goes when PEFT can return a layer's merged weight without changing the layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from torch import Tensor, nn

from stage2_trainer.sync.tensors.merge_math import Adapter, Change, TrainedRows

SAVED_COPY = ".modules_to_save."  # PEFT's trained full copy of a module ...
ORIGINAL_COPY = ".original_module."  # ... and the frozen one that it replaces
BASE_LAYER = ".base_layer."
TOKEN_ADAPTER = ".token_adapter"  # between a table and the rows of it that train


def adapted_layers(modules: dict[str, nn.Module]) -> frozenset[str]:
    """Return the names of the layers that have adapters."""
    return frozenset(name for name, one in modules.items() if isinstance(one, (LoraLayer, TrainableTokensLayer)))


def is_adapter(name: str, adapted: frozenset[str]) -> bool:
    """Whether a parameter is one of an adapter's own (`...q_proj.lora_A.default.weight`), below one of these layers."""
    if not adapted or BASE_LAYER in name:
        return False
    owner = name.rpartition(".")[0]
    while owner:
        if owner in adapted:
            return True
        owner = owner.rpartition(".")[0]
    return False


def change_of(name: str, layer: nn.Module) -> Change:
    """Return the change of an adapted layer's weight. Raises TypeError where its merge is not known here."""
    if isinstance(layer, TrainableTokensLayer) and len(layer.active_adapters) == 1:
        return _of_tokens(layer, layer.active_adapters[0])
    if isinstance(layer, (Linear, Embedding)) and len(layer.active_adapters) == 1:
        active = layer.active_adapters[0]
        variant = layer.lora_variant.get(active)
        if isinstance(layer, Linear) and not layer.lora_bias[active]:
            if variant is None:
                return _of_linear(layer, active)
            if isinstance(variant, DoraLinearVariant):
                return replace(_of_linear(layer, active), magnitude=_magnitude(layer, active))
        if isinstance(layer, Embedding) and variant is None:
            return _of_embedding(layer, active)
    raise TypeError(
        f"{name}: no merge is known for this adapter ({type(layer).__name__}); use one LoRA or DoRA adapter on linear"
        " layers, LoRA on embeddings, without lora_bias, or train the module in full (modules_to_save)"
    )


def _of_tokens(layer: Any, active: str) -> TrainedRows:
    rows = layer.trainable_tokens_delta[active]  # by its name a difference, but the rows themselves
    return TrainedRows(layer.token_indices[active], rows)


def _of_linear(layer: Any, active: str) -> Adapter:
    return Adapter(layer.lora_B[active].weight, layer.lora_A[active].weight, float(layer.scaling[active]))


def _magnitude(layer: Any, active: str) -> Tensor:
    magnitude: Tensor = layer.lora_magnitude_vector[active].weight
    return magnitude


def _of_embedding(layer: Any, active: str) -> Adapter:
    """An embedding adds s (B A)^T = s A^T B^T, its weight being of shape (vocabulary, hidden)."""
    up, down = layer.lora_embedding_A[active].T, layer.lora_embedding_B[active].T
    return Adapter(up, down, float(layer.scaling[active]))
