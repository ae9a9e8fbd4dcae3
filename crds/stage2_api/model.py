"""`model` and `template`: the model that is trained, and how records become its prompts.

Source: semantics sections 2 and 3; key names as ms-swift has them.
"""

from __future__ import annotations

from typing import Literal

from stage2_api.section import Section
from stage2_api.value_types import Path, Positive, Text


class Model(Section):
    """The model that is trained."""

    model: Path
    """Folder of the checkpoint, or its name on a hub, with the 1000 coordinate tokens already in its vocabulary. What
    comes from a hub lies in the cache (`HF_HOME`), which learner and servers share where they share that folder."""
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Number format in which weights are loaded; `auto` takes the checkpoint's own."""
    attn_impl: Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention kernel of the learner. `auto` attends within each sequence of a row: on a GPU by PyTorch's own flash
    kernel, elsewhere one after the other. `sdpa` masks the whole row, in memory that grows with its square. Without the
    flash-attn package `flash_attention_2` is `auto`; `flash_attention_3` needs its package and a GPU."""
    allow_pickled_weights: bool = False
    """Whether a folder may be loaded whose weights are pickled (`pytorch_model.bin`, `.pt`) and in no safetensors. A
    pickle may name any command; tensors alone are taken of it."""
    allow_remote_code: bool = False
    """Whether Python that the model folder brings (`auto_map` in its JSON files) runs in learner and servers, with all
    that they may do. A folder with such code is refused otherwise."""


class Template(Section):
    """How records become prompts."""

    template: Literal["qwen3_vl"] = "qwen3_vl"
    """Name of the chat template; the checkpoint's own is used."""
    system: Text | None = None
    """System turn of every prompt; null means none."""
    max_length: Positive | None = None
    """Longest sequence in tokens; also the length of packed rows unless `global_max_length` is set."""
    truncation_strategy: Literal["raise", "left", "right", "delete"] = "raise"
    """What happens to a prompt that is too long. Stage-2 training always refuses it, whatever stands here: a cut prompt
    would no longer be the one that was rolled out."""
    max_pixels: Positive | None = None
    """Most pixels of an image; larger ones are scaled down, on the servers as in the learner. Unset takes the
    checkpoint's own limit."""
    min_pixels: Positive | None = None
    """Fewest pixels of an image; smaller ones are scaled up. Unset takes the checkpoint's own limit."""
