"""PEFT 0.21's adapted layers, read from the inside: their names, and the merged weight of one.

PEFT merges in place only, and merging bf16 weights and unmerging them again changes a sixth of them in one cycle
(huggingface/trl#6688). Goes when PEFT can return a layer's merged weight without changing the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import Embedding, Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

SAVED_COPY = ".modules_to_save."  # PEFT's trained full copy of a module ...
ORIGINAL_COPY = ".original_module."  # ... and the frozen one that it replaces
BASE_LAYER = ".base_layer."


def is_adapter(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a parameter is one of an adapter's own (`...q_proj.lora_A.default.weight`)."""
    parts = name.split(".")
    owners = (".".join(parts[:i]) for i in range(1, len(parts)))
    return BASE_LAYER not in name and any(isinstance(modules[owner], LoraLayer) for owner in owners)


def merge_of(name: str, layer: nn.Module) -> Callable[[], Tensor]:
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
