"""Workarounds for transformers 5.19, each with its upstream thread and the condition under which it can go."""

from __future__ import annotations

from typing import Any


def disable_cache(model: Any) -> None:
    """Turn the key-value cache off in every configuration that is read during a forward pass.

    `Trainer` sets it on the outer configuration only; the text model reads its own, and with a cache the sequences of
    a packed row would see one another without an error. No upstream issue found for models with a text part of their
    own (huggingface/transformers#21737 is the same switch for gradient checkpointing). Goes when the sequences of a
    padding-free row are told apart with a cache too.
    """
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
