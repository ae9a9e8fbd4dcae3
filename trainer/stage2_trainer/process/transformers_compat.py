"""Workarounds for transformers 5.19, each with its upstream thread and the condition under which it can go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

_EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")


def disable_cache(model: Any) -> None:
    """Turn the key-value cache off in every configuration that is read during a forward pass.

    `Trainer` sets it on the outer configuration only; the text model reads its own, and with a cache the sequences of
    a packed row would see one another without an error. No upstream issue found for models with a text part of their
    own (huggingface/transformers#21737 is the same switch for gradient checkpointing). Goes when the sequences of a
    padding-free row are told apart with a cache too.
    """
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False


def save_as_stock(model: Any, folder: Path) -> None:
    """Save a model in the layout of the stock checkpoints, in which vLLM reads it.

    transformers turns the experts of Qwen3-VL-MoE around when it loads a stock checkpoint and leaves them so when it
    saves: `Transpose(check_dims=True)` of core_model_loading finds that they have the parameters' shapes already. It
    reads both layouts; vLLM turns around whatever it reads, and fills what does not fit with padding, silently. No
    upstream issue found. Goes when what is saved is what was loaded.
    """
    state = model.state_dict()
    if not any(map(_EXPERTS.search, state)):
        model.save_pretrained(folder)
        return
    turned = {name: turned_experts(name, tensor) for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=turned, save_original_format=False)


def turned_experts(name: str, tensor: Tensor) -> Tensor:
    """Return experts, (E, out, in) as transformers holds them, in the stock layout (E, in, out), or back.

    Any other tensor is returned as it is.
    """
    return tensor.transpose(1, 2) if _EXPERTS.search(name) else tensor


def layout_fault(model: Any) -> str | None:
    """Return why the layout of a model's experts cannot be told from their shapes; None where it can."""
    for name, parameter in model.named_parameters():
        if _EXPERTS.search(name) and parameter.shape[1] == parameter.shape[2]:
            sides = f"{parameter.shape[1]} x {parameter.shape[2]}"
            return f"{name} is {sides}, so that nobody can tell whether it lies as in the stock layout or turned around"
    return None
