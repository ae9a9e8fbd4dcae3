"""Workarounds for transformers 5.19, each with its upstream issue and the condition under which it goes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


def disable_cache(model: Any) -> None:
    """Turn the key-value cache off in every configuration that a forward pass reads.

    `Trainer` sets it on the outer configuration only. The text model reads its own, and with a cache the sequences of a
    packed row would silently see one another. No upstream issue found for models with a separate text part
    (huggingface/transformers#21737 is the same switch for gradient checkpointing). It goes when padding-free rows keep
    their sequences apart with a cache too.
    """
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False


def save_as_stock(model: Any, folder: Path) -> None:
    """Save a model in the layout of the stock checkpoints, which is what vLLM reads.

    transformers transposes the experts of Qwen3-VL-MoE when it loads a stock checkpoint, and not back when it saves:
    `Transpose(check_dims=True)` of core_model_loading sees that the shapes fit already. It reads both layouts. vLLM
    transposes whatever it reads, and silently pads what does not fit. No upstream issue found. It goes when what is
    saved is what was loaded.
    """
    state = model.state_dict()
    if not any(map(_EXPERTS.search, state)):
        model.save_pretrained(folder)
        return
    stock = {name: turned_experts(name, tensor) for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=stock, save_original_format=False)


def turned_experts(name: str, tensor: Tensor) -> Tensor:
    """Return experts, (E, out, in) as transformers holds them, in the stock layout (E, in, out), or back.

    Any other tensor is returned as it is.
    """
    return tensor.transpose(1, 2) if _EXPERTS.search(name) else tensor


def layout_fault(model: Any) -> str | None:
    """Return why the shapes of a model's experts do not show their layout; None where they do."""
    for name, parameter in model.named_parameters():
        if _EXPERTS.search(name) and parameter.shape[1] == parameter.shape[2]:
            sides = f"{parameter.shape[1]} x {parameter.shape[2]}"
            return f"{name} is {sides}, so its shape does not show whether it is transposed"
    return None
