"""The layers that vLLM makes of several of the checkpoint's: they can be loaded as a whole only."""

from __future__ import annotations

# What vLLM keeps in one matrix: a push of a part of it would leave garbage in the rest, silently.
FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def fused_layer(name: str) -> str:
    """Return the layer that vLLM loads a tensor into.

    >>> fused_layer("model.layers.0.self_attn.k_proj.bias")
    'model.layers.0.self_attn.qkv_proj'
    """
    owner = name.rpartition(".")[0]
    head, _, last = owner.rpartition(".")
    return f"{head}.{FUSED.get(last, last)}"
